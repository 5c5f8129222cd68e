"""Walks every import of the project and fails on an edge that points the wrong way (DESIGN §3)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLUGIN = ROOT / "inference_client/vllm_plugin"
LEAVES = {
    "easyrl.schema",
    "easyrl.config",
    "easyrl.metrics.event_log",
    "easyrl.runtime.seeding",
    "easyrl.runtime.numerics",
    "easyrl.runtime.durable_files",
    "easyrl.runtime.workers.child_process",
}
# room → what of ours it may import besides itself
ALLOWED = {
    "easyrl.kernels": set(),
    "easyrl.dataloaders": LEAVES,
    "easyrl.inference_client": LEAVES,
    "easyrl.rewards": LEAVES | {"easyrl.runtime.workers.worker_pool"},
    "easyrl.ledger.certificate": LEAVES
    | {
        "easyrl.ledger.format",
        "easyrl.ledger.checkpoints.manifest",
        "easyrl.ledger.journal",
        "easyrl.dataloaders.prompts.dataset",
    },
    "easyrl.recipes": LEAVES | {"easyrl.engines.base", "easyrl.kernels.logprobs.linear_token_loss"},
    "easyrl.engines": LEAVES
    | {
        "easyrl.kernels",
        "easyrl.models.lora",
        "easyrl.models.loading",
        "easyrl.recipes",
        "easyrl.models.policy_model",
        "easyrl.models.tri_model",
    },
    "easyrl.trainer.loop": LEAVES
    | {
        "easyrl.trainer.accumulation",
        "easyrl.runtime.collectives",
        "easyrl.metrics.batch_metrics",
        "easyrl.ledger.certificate.records",
        "easyrl.ledger.closed_batch",
        "easyrl.engines.base",
    },
    "easyrl.trainer.accumulation": LEAVES
    | {
        "easyrl.runtime.collectives",
        "easyrl.metrics.batch_metrics",
        "easyrl.engines.base",
        "easyrl.trainer.look_ahead",
        "easyrl.runtime.stopping",
    },
    "easyrl.trainer.look_ahead": LEAVES | {"easyrl.engines.base", "easyrl.trainer.row_split"},
    "easyrl.trainer.row_split": LEAVES,
    "easyrl.ledger.closed_batch": LEAVES
    | {"easyrl.metrics.batch_metrics", "easyrl.ledger.certificate.records"},
    "easyrl.ledger.journal": LEAVES
    | {
        "easyrl.ledger.format",
        "easyrl.dataloaders.producer.group_stream",
        "easyrl.dataloaders.producer.open_samples",
        "easyrl.dataloaders.producer.rollout_generator",
    },
    "easyrl.schema": set(),
    "easyrl.config": set(),
    "easyrl.metrics.event_log": set(),
    "easyrl.runtime.numerics": set(),
    "easyrl.runtime.workers.child_process": set(),
    "easyrl.runtime.workers.worker_process": {"easyrl.runtime.workers.child_process"},
    "easyrl.runtime.workers.worker_pool": {
        "easyrl.runtime.workers.child_process",
        "easyrl.runtime.workers.worker_process",
    },
}
WIRING = {"easyrl.build", "easyrl.train"}
HEAVY = {"torch", "deepspeed", "transformers", "math_verify", "pyarrow"}
LIGHT = {
    "easyrl",
    "easyrl.schema",
    "easyrl.config",
    "easyrl.config.checks",
    "easyrl.config.file",
    "easyrl.runtime.launcher_watch",
    "easyrl.runtime.notices",
    "easyrl.runtime.signals",
    "easyrl.runtime.stacks",
    "easyrl.runtime.stopping",
    "easyrl.train",
    "easyrl.runtime.watchdog",
    "easyrl.runtime.workers.child_process",
    "easyrl.runtime.workers.worker_pool",
    "easyrl.runtime.workers.worker_process",
    "easyrl.rewards.worker",
    "easyrl.inference_client.client",
    "easyrl.inference_client.responses",
    "easyrl.inference_client.fetching.fetcher_pool",
    "easyrl.inference_client.fetching.fetcher_messages",
    "easyrl.inference_client.fetching.fetcher_process",
}


def module_files() -> dict[str, Path]:
    files = {}
    for folder, prefix in (
        ("easyrl", "easyrl"),
        ("dataloaders", "easyrl.dataloaders"),
        ("inference_client", "easyrl.inference_client"),
        ("kernels", "easyrl.kernels"),
    ):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((prefix, *parts)).removesuffix(".__init__")
            files[name] = path
    return files


def imports(path: Path, *, module_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    found = set()
    nodes = tree.body if module_level_only else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level == 1 and PLUGIN in path.parents:
                continue  # has another name inside vLLM; stays in its own folder
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


FILES = module_files()


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_imports_only_what_it_may(room):
    members = [name for name in FILES if within(name, room)]
    assert members, f"{room} has no files"
    for name in members:
        ours = {i for i in imports(FILES[name]) if within(i, "easyrl") and i != "easyrl"}
        wrong = {
            i
            for i in ours
            if not within(i, room) and not any(within(i, ok) for ok in ALLOWED[room])
        }
        assert not wrong, f"{name} must not import {sorted(wrong)}"


PLAIN = {
    "__future__",
    "collections",
    "contextlib",
    "dataclasses",
    "functools",
    "importlib",
    "inspect",
    "logging",
    "math",
    "types",
    "typing",
    "weakref",
}


# modules that are imported only where their package is: a kernel is compiled from module level
LAZY_KERNELS = {"easyrl.kernels.logprobs.triton_logprob": {"triton"}}


def test_kernels_import_only_torch_at_module_level():
    for name, path in FILES.items():
        if within(name, "easyrl.kernels"):
            top = {i.split(".")[0] for i in imports(path, module_level_only=True)}
            of_backend = LAZY_KERNELS.get(name, set())
            assert top <= {"torch", "easyrl"} | PLAIN | of_backend, (name, top)


def test_only_the_wiring_knows_all_rooms():
    for name, path in FILES.items():
        rooms = {
            room
            for room in (
                "easyrl.dataloaders",
                "easyrl.inference_client",
                "easyrl.engines.deepspeed.engine",
            )
            if any(within(i, room) for i in imports(path)) and not within(name, room)
        }
        if len(rooms) == 3:
            assert any(within(name, room) for room in WIRING), f"{name} imports {sorted(rooms)}"


@pytest.mark.parametrize("name", sorted(LIGHT))
def test_what_worker_processes_import_is_light(name):
    heavy = {i.split(".")[0] for i in imports(FILES[name], module_level_only=True)} & HEAVY
    assert not heavy, f"{name} imports {sorted(heavy)} at module level"
