"""EasyRL: strictly on-policy, periodically asynchronous RL training for language models."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from easyrl.api import train_policy

__all__ = ["train_policy"]
__version__ = "0.1.0"

# In a checkout the folders dataloaders/, inference_client/ and kernels/ lie beside this one; an
# installed package has them inside. Nothing else is done here: worker processes import this package
# and must stay light.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "setup.py").is_file() and (_checkout / "dataloaders").is_dir():
    __path__.append(str(_checkout))


def __getattr__(name: str) -> Any:
    if name == "train_policy":
        from easyrl.api import train_policy

        return train_policy
    raise AttributeError(f"module 'easyrl' has no attribute {name!r}")
