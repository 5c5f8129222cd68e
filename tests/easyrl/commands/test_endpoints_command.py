"""``easyrl endpoints``: what it changes, what it shows, what it refuses."""

import json
import re
import time

import pytest
from typer.testing import CliRunner

from easyrl.__main__ import command_line
from easyrl.inference_client.pool.endpoint_list import (
    STATE_FILE,
    EndpointState,
    begin_membership,
    read_wanted,
    write_state,
)

A, B = "http://host-a:8000", "http://host-b:8000"


def run(*arguments: object):
    return CliRunner().invoke(command_line(), ["endpoints", *map(str, arguments)])


def state_of(url: str, state: str = "usable") -> EndpointState:
    return EndpointState(url, state, "run:0:3", in_flight=17, failures=2, served=4711)


def test_add_and_remove_change_the_wanted_list(tmp_path):
    begin_membership(tmp_path, [A])
    assert run("add", tmp_path, B + "/").exit_code == 0
    assert list(read_wanted(tmp_path).added) == [A, B]
    result = run("remove", tmp_path, A)
    assert result.exit_code == 0 and "in flight finishes" in result.output
    assert list(read_wanted(tmp_path).added) == [B]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("add", "DIR", A), "is an endpoint of .* already.*remove it first"),
        (("add", "DIR", "host:8000"), "not an http:// or https:// URL; write it as"),
        (("add", "DIR", "http://"), "names no server"),
        (
            ("add", "DIR", "http://host:99999"),
            "Port out of range 0-65535; write it as http://host:8000\n",
        ),
        (("add", "DIR/elsewhere", B), "no run in .*elsewhere.*run.output_dir"),
        (("list", "DIR/elsewhere"), "no run in .*elsewhere"),
        (("remove", "DIR", B), f"{B} is no endpoint of .*there are: {A}"),
        (("remove", "DIR", A), "is the last endpoint .*--force"),
    ],
)
def test_what_cannot_be_done_says_why_and_changes_nothing(tmp_path, arguments, message):
    begin_membership(tmp_path, [A])
    before = read_wanted(tmp_path)
    result = run(*(str(a).replace("DIR", str(tmp_path)) for a in arguments))
    assert result.exit_code == 2
    assert re.search(message, result.stderr), result.stderr
    assert result.stderr.startswith("easyrl: ") and "Traceback" not in result.stderr
    assert read_wanted(tmp_path) == before
    assert not (tmp_path / "elsewhere").exists()


def test_names_are_shown_as_they_are_brackets_and_colons_too(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")  # of a terminal, which this is not
    run_dir = tmp_path / "[bold]run[/oops]"
    run_dir.mkdir(parents=True)
    url = "http://[::1]:8000"
    begin_membership(run_dir, [url])
    said = "excluded: it said [/red] :smile:"
    write_state(run_dir, [state_of(url, said)], running=True)
    result = run("list", run_dir)
    assert result.exit_code == 0, result.exception
    assert url in result.output and said in result.output and "[bold]run[/oops]" in result.output
    result = run("add", run_dir, "http://[fd00::2]:8000/")
    assert result.exit_code == 0 and "http://[fd00::2]:8000 is added" in result.output


def test_the_last_may_be_removed_with_force(tmp_path):
    begin_membership(tmp_path, [A])
    assert run("remove", "--force", tmp_path, A).exit_code == 0
    assert read_wanted(tmp_path).added == {}


def test_list_shows_each_and_whether_the_run_is_running(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    begin_membership(tmp_path, [A, B])
    shown = run("list", tmp_path).output
    assert "has not started" in shown and shown.count("not taken in yet") == 2

    leaving = state_of("http://host-c:8000", "removed, finishes what is in flight")
    write_state(tmp_path, [state_of(A), leaving], running=True)
    shown = run("list", tmp_path).output
    row = next(line for line in shown.splitlines() if A in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        A, "usable", "run:0:3", "17", "4711", "2",
    ]  # fmt: skip
    assert "host-c" in shown and ": running" in shown and shown.count("not taken in yet") == 1

    write_state(tmp_path, [state_of(A)], running=False)
    assert "NOT RUNNING" in run("list", tmp_path).output
    written = json.loads((tmp_path / STATE_FILE).read_text())
    (tmp_path / STATE_FILE).write_text(
        json.dumps(written | {"running": True, "updated_s": time.time() - 300})
    )
    assert "NOT RUNNING, last seen 5 min ago" in run("list", tmp_path).output
    assert "not running" in run("add", tmp_path, "http://host-d:1").output
