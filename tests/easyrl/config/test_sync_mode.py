"""A synchronous run is the asynchronous one with a wait more: no other setting follows the mode."""

import ast
from pathlib import Path

from easyrl.config.file import validate_config
from easyrl.config.trainer import no_look_ahead

ROOT = Path(__file__).parents[3]
TREE = {
    "model": {"path": "models/m"},
    "data": {"files": ["train.jsonl"]},
    "inference": {"endpoints": ["http://127.0.0.1:8000"]},
    "rewards": [{"name": "math"}],
    "recipe": {"name": "grpo", "kl_coef": 0.01},
}
READERS = {
    "easyrl/build/trainer.py",  # the accumulator waits, or does not
    "easyrl/config/trainer.py",  # look_ahead, said in the comment of run.mode
    "easyrl/config/records.py",  # refuses it: there is nothing to wait for
    # what a run is looked at with: advice simulates a synchronous batch as one
    "easyrl/simulation/advice.py",
    "easyrl/simulation/run_setting.py",
}


def test_the_mode_changes_no_other_value_of_the_configuration():
    trees = []
    for mode in ("async", "sync"):
        tree = validate_config({**TREE, "run": {"mode": mode}}).model_dump(mode="json")
        assert tree["run"].pop("mode") == mode
        trees.append(tree)
    assert trees[0] == trees[1]


def test_the_mode_is_read_only_where_the_documentation_says():
    readers = set()
    for room in ("easyrl", "dataloaders", "inference_client", "kernels"):
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Attribute) and node.attr == "mode":
                    value = ast.unparse(node.value)
                    if value == "run" or value.endswith(".run"):
                        readers.add(str(file.relative_to(ROOT)))
    assert readers == READERS


def test_a_synchronous_run_says_that_nothing_is_computed_ahead():
    config = validate_config({**TREE, "run": {"mode": "sync"}})
    reason = no_look_ahead(config.trainer, config.run)
    assert reason is not None and "run.mode=sync" in reason
    assert no_look_ahead(config.trainer, validate_config(TREE).run) is None
