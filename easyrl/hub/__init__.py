"""The Hugging Face Hub: names of models become folders of this machine.

Consumes: a configuration whose paths may be Hub ids. Waits for: the download, where there is one.
Produces: the same configuration with folders in their place; nothing behind it knows of the Hub.
"""
