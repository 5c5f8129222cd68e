"""What a GPU machine may lack beside torch: the packages whose absence skips a ``gpu`` test."""

from __future__ import annotations

# Kernels that only some machines have, and easyrl's requirements that torch and transformers do not
# bring: make test-gpu runs in an environment of the user's.
OPTIONAL_PACKAGES = frozenset(
    (
        *("triton", "liger_kernel", "flash_attn", "flash_attn_interface"),
        *("deepspeed", "peft", "transformers", "safetensors", "tokenizers"),
        *("aiohttp", "blake3", "msgspec", "omegaconf", "orjson", "psutil", "pyarrow", "pydantic"),
    )
)
TOO_OLD_TORCH = "torch.compile"  # so says FlexAttention's loading where it lacks an argument


def missing_package(error: BaseException) -> ImportError | None:
    """The failed import of an optional package, or of something that it is too old to have.

    ``error`` or what caused it. None where the import of anything else failed, product code's
    among them: that is a failure.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ImportError):
            name = cause.name or ""
            if name == TOO_OLD_TORCH or name.partition(".")[0] in OPTIONAL_PACKAGES:
                return cause
        cause = cause.__cause__
    return None
