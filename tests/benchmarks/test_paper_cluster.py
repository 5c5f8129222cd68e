"""Cluster files, and what is started on a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.parts.paper.cluster import Cluster, load_cluster
from benchmarks.parts.paper.cluster_bench import ClusterBench
from benchmarks.parts.paper.sides import Side
from benchmarks.parts.paper.small_bench import CONFIG
from benchmarks.parts.paper.tables import ASYNC, SYNC, TABLES
from easyrl.config import ConfigError
from easyrl.config.file import load_config

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "configs/launch/paper_cluster.yaml"


def cluster(num_endpoints: int = 2, hosts: int = 1, **changed: Any) -> dict[str, Any]:
    whole = {
        "endpoints": [{"url": f"http://i{n}:8000", "devices": 4} for n in range(num_endpoints)],
        "trainers": [{"host": f"t{n}", "devices": 8} for n in range(hosts)],
        "model": "models/M",
        "data": ["data/a.json"],
    }
    return {key: value for key, value in (whole | changed).items() if value is not None}


def write(path: Path, values: Any) -> Path:
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    return path


# ---- the file ------------------------------------------------------------------------------------


def test_the_example_is_the_cluster_of_the_first_table() -> None:
    assert load_cluster(EXAMPLE).devices == 16


@pytest.mark.parametrize(
    "values, wanted",
    [
        (cluster(endpoint=[]), r"endpoint: unknown key; did you mean 'endpoints'\?"),
        (cluster(endpoints=[]), r"endpoints: is empty; name at least one"),
        (cluster(model=None), r"model: is required"),
        (cluster(data="data/a.json"), r"data: .*list"),
        (cluster(trainers=[{"host": "t", "devices": 0}]), r"trainers\[0\]\.devices: .*got 0"),
        (cluster(trainers=[{"host": "t 1", "devices": 8}]), r"trainers\[0\]\.host: .*hostfile"),
        (cluster(trainers=[{"host": "t", "device": 8}]), r"device: unknown key; did you mean"),
        (cluster(endpoints=[{"url": "i0:8000"}]), r"endpoints\[0\]\.url: .*http://host:8000"),
        (cluster(endpoints=[{"url": "http://i:1"}] * 2), r"endpoints: names http://i:1 twice"),
        (cluster(settings=["parallel.tensor 2"]), r"settings: .*key\.path=value"),
        ("- a list\n", r"has no keys; configs/launch/paper_cluster\.yaml"),
        ("model: {\n", r"cluster\.yaml:\d+: .*close this bracket"),
    ],
)
def test_a_bad_file_is_named_with_key_and_remedy(tmp_path: Path, values: Any, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted) as caught:
        load_cluster(write(tmp_path / "cluster.yaml", values))
    assert "cluster.yaml" in str(caught.value)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml does not exist"):
        load_cluster(tmp_path / "absent.yaml")


# ---- its parts -----------------------------------------------------------------------------------


def test_a_part_has_the_first_ones_divided_as_the_whole() -> None:
    whole = Cluster.model_validate(cluster(num_endpoints=8, hosts=4))
    assert whole.devices == 64
    part = whole.part(32)
    assert [e.url for e in part.endpoints] == [f"http://i{n}:8000" for n in range(4)]
    assert [t.host for t in part.trainers] == ["t0", "t1"] and part.devices == 32


def test_a_part_that_cannot_be_is_refused() -> None:
    whole = Cluster.model_validate(cluster(num_endpoints=8, hosts=4))
    with pytest.raises(ConfigError, match=r"trainers: no first .* 4 devices, which 8 of"):
        whole.part(8)  # an endpoint, and half of a host
    with pytest.raises(ConfigError, match="have 64 devices together, and 128 are needed"):
        whole.part(128)


# ---- what is started -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_a_tables_configuration_is_accepted_on_the_cluster(name: str, tmp_path: Path) -> None:
    table = TABLES[name]
    whole = Cluster.model_validate(cluster(num_endpoints=8, hosts=4))
    bench = ClusterBench(whole, table.config, table.steps)
    for side in table.sides:
        config = bench.checked(side, tmp_path / "run")
        assert (config.run.mode, config.trainer.max_steps) == (side.mode, table.steps)
        assert config.trainer.packing == ("prompt" if side.name == "shared" else "none")
        assert config.evaluation is None
        assert len(config.inference.urls) == (side.devices or 64) // 8
    load_config(table.config)  # and by itself


def test_the_small_configuration_has_a_reference_too() -> None:
    assert load_config(ROOT / CONFIG).recipe.kl_coef == pytest.approx(
        load_config(TABLES["table1"].config).recipe.kl_coef
    )


def test_sync_and_async_differ_in_the_mode_alone(tmp_path: Path) -> None:
    bench = ClusterBench(load_cluster(EXAMPLE), TABLES["table1"].config, 3)
    sync, overlapped = (bench.overrides(side, tmp_path) for side in (SYNC, ASYNC))
    different = set(sync) ^ set(overlapped)
    assert different == {"run.mode=sync", "run.mode=async"}


def test_the_command_is_the_launchers_and_resumes_what_has_begun(tmp_path: Path) -> None:
    whole = Cluster.model_validate(cluster(settings=["trainer.batch_size=8"]))
    bench = ClusterBench(whole, TABLES["table1"].config, 3, settings=["trainer.batch_size=4"])
    run_dir, hosts = tmp_path / "run", tmp_path / "run.hosts"
    command = bench.command(SYNC, run_dir, hosts)
    assert command[1:5] == ["--hostfile", str(hosts), "--module", "easyrl.train"]
    assert 'inference.endpoints=["http://i0:8000","http://i1:8000"]' in command
    assert "weight_sync.advertise_host=t0" in command and "--resume" not in command
    assert bench.checked(SYNC, run_dir).trainer.batch_size == 4  # the command line comes last
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("")
    assert bench.command(SYNC, run_dir, hosts)[-1] == "--resume"


def test_a_run_that_is_complete_is_read_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def run_command(command: list[str], log: Path, environment: object) -> None:
        started.append(command)
        write_steps(2)

    def write_steps(count: int) -> None:
        measured = {"time/step_s": 2.0, "tokens/prompt": 10.0, "tokens/response": 40.0}
        lines = [json.dumps({"step": n} | measured) + "\n" for n in range(count)]
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run/metrics.jsonl").write_text("".join(lines))

    monkeypatch.setattr("benchmarks.parts.paper.cluster_bench.run_command", run_command)
    bench = ClusterBench(load_cluster(EXAMPLE), TABLES["table1"].config, 2)
    write_steps(1)
    for _ in range(2):
        run = bench.run(SYNC, tmp_path / "run")
    assert len(started) == 1
    assert (tmp_path / "run.hosts").read_text() == "train0 slots=8\n"
    assert run.tpspd == pytest.approx((10 * 16 + 40) / 2 / 16)


def test_what_a_table_cannot_use_is_said_before_anything_is_started(tmp_path: Path) -> None:
    bench = ClusterBench(load_cluster(EXAMPLE), TABLES["table1"].config, 2, ["trainer.zero_stag=1"])
    with pytest.raises(ConfigError, match=r"trainer\.zero_stag: unknown key; did you mean"):
        bench.checked(Side("a"), tmp_path)


@pytest.mark.parametrize(
    "arguments, wanted",
    [
        (["table1"], "give either --cluster CLUSTER.yaml or --small"),
        (["table1", "--small", "--cluster", "a.yaml"], "give either"),
        (["table3", "--cluster", str(EXAMPLE)], "have 16 devices together, and 32 are needed"),
        (["table1", "--small", "--baseline", "verl:absent"], "there is no file absent"),
        (["table3", "--small", "--baseline", "verl:log"], "table3 has no row for another"),
        (["startup", "--small", "--baseline", "trl:log"], "measure table1 or table2 or shared_"),
    ],
)
def test_the_command_refuses_in_one_sentence(
    arguments: list[str],
    wanted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from benchmarks import paper

    monkeypatch.setattr(sys, "argv", ["paper", *arguments, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        paper.main()
    assert wanted in f"{caught.value.code} {capsys.readouterr().err}"  # argparse prints its own


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_a_small_run(table: str) -> None:
    command = [sys.executable, "-m", "benchmarks.paper", table, "--small", "--repeats", "1"]
    ended = subprocess.run([*command, "--steps", "1"], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout.splitlines()[-1])["rows"]
    wanted = {"name", "tpspd", "ratio", "paper_ratio", "bound"}
    assert len(rows) == len(TABLES[table].sides) and all(wanted <= set(row) for row in rows)
    if table == "table2":  # one side, and no baseline to compare it with
        assert rows[0]["tpspd"] > 0 and rows[0]["ratio"] is None
    else:
        assert rows[-1]["ratio"] > 1
