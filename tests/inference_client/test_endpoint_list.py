"""The wanted list on disk, and how a rank follows it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from easyrl.inference_client.pool.endpoint_list import (
    WANTED_FILE,
    MembershipError,
    MembershipFollower,
    begin_membership,
    change_wanted,
    read_state,
    read_wanted,
)
from tests.inference_client.fake_endpoint import FakeEndpoint
from tests.inference_client.pool_cases import V1, ask, pool_of, repairer, servers, until


def test_an_attempt_begins_with_what_its_configuration_says(tmp_path):
    first = begin_membership(tmp_path, ["http://a", "http://b"])
    assert read_wanted(tmp_path) == first and first.version == 1
    change_wanted(tmp_path, lambda wanted: wanted.with_added("http://c").without("http://a"))
    assert list(read_wanted(tmp_path).added) == ["http://b", "http://c"]
    second = begin_membership(tmp_path, ["http://a"])
    assert second.version == 4 and list(read_wanted(tmp_path).added) == ["http://a"]


def test_a_key_is_named_in_the_list_and_forgotten_with_its_endpoint(tmp_path):
    begin_membership(tmp_path, ["http://a"])
    change_wanted(tmp_path, lambda wanted: wanted.with_added("http://b", "KEY_OF_B"))
    assert read_wanted(tmp_path).api_key_envs == {"http://b": "KEY_OF_B"}
    change_wanted(tmp_path, lambda wanted: wanted.with_added("http://c"))
    assert read_wanted(tmp_path).api_key_envs == {"http://b": "KEY_OF_B"}
    change_wanted(tmp_path, lambda wanted: wanted.without("http://b"))
    assert read_wanted(tmp_path).api_key_envs == {}


async def test_a_rank_adds_an_endpoint_with_the_key_that_the_list_names(tmp_path, monkeypatch):
    (old,) = servers(1)
    monkeypatch.setenv("EASYRL_TEST_KEY", "its own")
    async with FakeEndpoint(api_key="its own") as new, pool_of(old) as pool:
        begun = begin_membership(tmp_path, [old.url])
        follower = MembershipFollower(pool, tmp_path, begun, writes_state=False, poll_s=0.02)
        await follower.start()
        change_wanted(tmp_path, lambda wanted: wanted.with_added(new.url, "EASYRL_TEST_KEY"))
        await until(lambda: len(pool.endpoints) == 2 and pool.endpoints[1].is_up)
        await follower.close()
        assert new.keys == {"Bearer its own"}


def test_changes_at_the_same_time_do_not_undo_each_other(tmp_path):
    begin_membership(tmp_path, [])
    urls = [f"http://host:{port}" for port in range(1000, 1020)]
    threads = [
        threading.Thread(target=change_wanted, args=(tmp_path, lambda w, u=url: w.with_added(u)))
        for url in urls
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = read_wanted(tmp_path)
    assert sorted(wanted.added) == urls and wanted.version == 21


@pytest.mark.parametrize("content", ["", '{"version": 3, "endp', "[]", '{"version": 2}'])
def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path, content):
    (tmp_path / WANTED_FILE).write_text(content)
    with pytest.raises(MembershipError, match=WANTED_FILE):
        read_wanted(tmp_path)


async def test_a_rank_follows_the_list_and_says_how_its_endpoints_are(tmp_path, caplog):
    (old,) = servers(1)
    async with FakeEndpoint() as new, pool_of(old) as pool:
        pool.set_repair(repairer(pool))
        begun = begin_membership(tmp_path, [old.url])
        options = {"writes_state": True, "poll_s": 0.02, "state_interval_s": 0.02}
        follower = MembershipFollower(pool, tmp_path, begun, **options)
        await follower.start()
        change_wanted(tmp_path, lambda wanted: wanted.with_added(new.url))
        await until(lambda: len(pool.endpoints) == 2 and pool.endpoints[1].usable(V1))
        change_wanted(tmp_path, lambda wanted: wanted.without(old.url))
        await until(lambda: [endpoint.url for endpoint in pool.endpoints] == [new.url])
        assert (await ask(pool, 0)).endpoint == new.url
        await until(lambda: [e.served for e in read_state(tmp_path).endpoints] == [1])
        (state,) = read_state(tmp_path).endpoints
        assert (state.url, state.state, state.confirmed_version) == (new.url, "usable", V1)
        assert read_state(tmp_path).is_alive

        pool.exclude(pool.endpoints[0], "failed its proof twice")
        # Removed and added between two looks: it is tried again all the same.
        change_wanted(tmp_path, lambda wanted: wanted.without(new.url).with_added(new.url))
        await until(lambda: pool.endpoints and pool.endpoints[0].usable(V1))
        await follower.close()
        assert not read_state(tmp_path).is_alive


async def test_a_half_written_or_missing_list_changes_nothing_and_is_told_once(tmp_path, caplog):
    (server,) = servers(1)
    async with pool_of(server) as pool:
        begun = begin_membership(tmp_path, [server.url])
        follower = MembershipFollower(pool, tmp_path, begun, writes_state=False, poll_s=0.02)
        await follower.start()
        (tmp_path / WANTED_FILE).write_text('{"version": 9, "endp')
        await until(lambda: "cannot be read" in caplog.text)
        (tmp_path / WANTED_FILE).unlink()
        await asyncio.sleep(0.2)
        assert caplog.text.count("stay as they are") == 1
        assert [endpoint.url for endpoint in pool.endpoints] == [server.url]
        (tmp_path / WANTED_FILE).write_text(
            '{"version": 9, "endpoints": [{"url": "nonsense", "added": 9}]}'
        )
        await until(lambda: pool.endpoints == [])
        assert "'nonsense' is not an http" in caplog.text
        begin_membership(tmp_path, [server.url])
        await until(lambda: len(pool.endpoints) == 1)
        await follower.close()
