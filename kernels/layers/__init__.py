"""RMSNorm, rotary embedding and SwiGLU: plain, and as fused kernels of other packages.

A fused layer is compared with the plain one at its first use.
"""
