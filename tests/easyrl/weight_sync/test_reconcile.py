"""The order of events of a reconciliation, against endpoints whose every answer is scripted."""

import asyncio

import numpy as np
import pytest

from easyrl.inference_client.adapter_names import AdapterNames
from easyrl.inference_client.errors import EndpointError, EndpointUnavailable, NotAnswered
from easyrl.inference_client.pool.endpoint import Endpoint
from easyrl.schema import Completion, VersionSpan
from easyrl.timeline.spans import ignore_span
from easyrl.weight_sync.canary import CanaryReading, Expected
from easyrl.weight_sync.confirm import ConfirmedEndpoints
from easyrl.weight_sync.fan_out import FanOut
from easyrl.weight_sync.proof import Probe, ProofFailed, Prover, Shown
from easyrl.weight_sync.push import WeightPusher
from easyrl.weight_sync.reconcile import MOST_LATE, DamagedCopy, Reconciler
from easyrl.weight_sync.target import MOST_CHUNKS
from tests.easyrl.weight_sync.scripted_endpoint import (
    PUSH,
    UPDATING,
    URL,
    VERSION,
    WEIGHTS,
    Announcer,
    ScriptedClient,
    failing,
    stream,
    until,
)
from tests.inference_client.served_tensors import ArtifactInMemory

PROVED = ["prove", "accept", "reset", "resume", "sample"]  # nothing is generated before the proof
KEPT = ["prove", "resume", "sample"]  # by one that generates, unless somebody has paused it
STAMPED = ["stamp", "ask"]
AGAIN = PUSH[:]  # after a failure it is told again where the weights are
WRONG = {name: weight + 1 for name, weight in WEIGHTS.items()}
SAID = Expected((np.array([5], np.int32),), (np.array([-1.0], np.float32),))


class FakePool:
    """The part of ``EndpointPool`` that a reconciliation uses; notes what becomes of endpoints."""

    def __init__(self, *endpoints: Endpoint) -> None:
        self.endpoints = list(endpoints)
        self.adapters = AdapterNames()
        self.events: list[str] = []
        self.span = ignore_span

    def quarantine(self, endpoint: Endpoint, reason: str) -> None:
        self.events.append("quarantine")
        endpoint.confirmed_version = None
        endpoint.abort_attempts(EndpointUnavailable(endpoint.url, reason))

    def set_aside(self, endpoint: Endpoint, error: EndpointError) -> None:
        self.events.append("set aside")
        endpoint.down = error.reason

    def confirm(self, endpoint: Endpoint, version: str, *, cleared: bool = True) -> None:
        self.events.append("confirm")
        assert cleared
        endpoint.confirmed_version = version
        endpoint.proof += 1

    def withdraw_confirmations(self) -> None:
        for endpoint in self.endpoints:
            endpoint.confirmed_version = None


class ScriptedCanary:
    """Samples of a log-probability that the test chooses, stamped as the endpoint stamps."""

    def __init__(self, *clients: ScriptedClient) -> None:
        self.clients = {client.url: client for client in clients}
        self.logprob = -1.0

    async def sample(self, endpoint: Endpoint) -> list[Completion]:
        url = endpoint.url
        client = self.clients[url]
        await client._called("sample")
        tokens, spans = np.array([5], np.int32), (VersionSpan(client.version, 0, 1),)
        logprobs = np.array([self.logprob], np.float32)
        return [Completion(tokens, logprobs, "length", spans, url, np.ones(1, bool))]


class Parts:
    """One scripted endpoint, and what reconciles it."""

    def __init__(self, script=None) -> None:
        self.client = ScriptedClient(script)
        self.endpoint = Endpoint(self.client, 1)
        self.pool = FakePool(self.endpoint)
        self.canary = ScriptedCanary(self.client)
        self.prover = Prover(self.canary, tolerance=0.1, reads_bits=True)
        self.reconciler = Reconciler(self.pool, WeightPusher(Announcer()), self.prover)
        self.target = stream(1)

    def reconcile(self):
        self.target.expected = SAID
        return self.reconciler.reconcile(self.endpoint, self.target, self.target.known)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("easyrl.weight_sync.push.RETRY_PAUSES_S", (0.001,) * 4)


def test_pause_updating_push_prove_canary_stamp():
    async def story():
        parts = Parts()
        shown = await parts.reconcile()
        client = parts.client
        assert client.calls == [*PUSH, *PROVED, *STAMPED]
        assert shown.reading == CanaryReading(0.0, 0.0, 0.0, 1)
        stamps = dict(client.stamps[: len(PUSH)])
        assert stamps["pause"] == "default" and stamps["start"] == UPDATING
        assert {stamp for _, stamp in client.stamps[3:-1]} == {UPDATING}  # up to the last stamp
        assert client.version == VERSION
        client.calls.clear()
        await parts.reconcile()  # it was only away
        assert client.calls == KEPT

    asyncio.run(story())


def test_after_a_push_that_failed_the_next_one_resets_before_anything_is_generated():
    """What the half-pushed weights have left in a cache must not be read under the whole ones."""

    async def story():
        parts = Parts({"finish": failing(EndpointError(URL, "no"))})
        await parts.reconcile()
        calls = parts.client.calls
        again = calls.index("abandon")
        assert calls[again : again + 2] == ["abandon", "resume"]
        assert calls[again + 2 :] == [*AGAIN, *PROVED, *STAMPED]

    asyncio.run(story())


def test_one_that_fails_the_proof_of_its_bits_makes_no_token_of_them():
    """Excluded it goes on, so that what other ranks have sent it ends; under no version."""

    async def story():
        parts = Parts()
        parts.client.served = WRONG
        with pytest.raises(ProofFailed, match="serves other weights"):
            await parts.reconcile()
        assert parts.client.calls == [*PUSH, "prove", *AGAIN, "prove", "resume"]
        assert parts.client.version == UPDATING
        parts.client.calls.clear()
        parts.client.served = WEIGHTS
        await parts.reconcile()
        assert parts.client.calls == [*AGAIN, *PROVED, *STAMPED]

    asyncio.run(story())


@pytest.mark.parametrize(
    "broken", ["update", "finish", "prove", "accept", "reset", "resume", "sample", "ask"]
)
def test_what_fails_half_way_serves_under_no_version_and_is_pushed_again(broken):
    async def story():
        parts = Parts({broken: failing(EndpointError(URL, "out of luck"))})
        await parts.reconcile()
        client = parts.client
        assert parts.pool.events == ["quarantine"]
        assert client.calls.count("update") == 2 and client.calls.count("init") == 2
        assert client.calls[-len([*AGAIN, *PROVED, *STAMPED]) :] == [*AGAIN, *PROVED, *STAMPED]
        first_touch = client.calls.index("start")
        wanted = [name for name, stamp in client.stamps[first_touch:] if stamp == VERSION]
        # "ask" and what follows its refusal: until the stamp is taken away again
        assert wanted == (["ask", "stamp", "ask"] if broken == "ask" else ["ask"])

    asyncio.run(story())


def test_a_stamp_that_cannot_be_taken_back_at_once_is_taken_back_later(caplog):
    async def story():
        parts = Parts({"ask": failing(EndpointError(URL, "restarted"))})
        client = parts.client
        good = client.set_weight_version

        async def broken(version, timeout_s=None):
            if version == UPDATING and client.version == VERSION and broken.times:
                broken.times -= 1
                raise EndpointUnavailable(URL, "connection lost")
            await good(version, timeout_s)

        broken.times = 1
        client.set_weight_version = broken
        await parts.reconcile()
        assert client.version == VERSION and broken.times == 0
        assert f"taking the stamp {VERSION} back failed: connection lost" in caplog.text

    asyncio.run(story())


def test_who_keeps_a_stamp_that_it_does_not_deserve_is_gone_and_not_served(caplog):
    """Not excluded for good, nor pushed to under the good stamp: it comes back by a repair."""

    async def story():
        parts = Parts({"ask": failing(EndpointError(URL, "restarted"))})
        client = parts.client
        good = client.set_weight_version

        async def broken(version, timeout_s=None):
            if version == UPDATING and client.version == VERSION:
                raise EndpointUnavailable(URL, "connection lost")
            await good(version, timeout_s)

        client.set_weight_version = broken
        with pytest.raises(EndpointUnavailable, match=f"stamp {VERSION} back.*connection lost"):
            await parts.reconcile()
        assert parts.endpoint.confirmed_version is None and parts.pool.events == ["quarantine"]
        assert client.calls.count("update") == 1
        assert "restarted" in caplog.text and "connection lost" in caplog.text
        client.set_weight_version = good
        client.calls.clear()
        await parts.reconcile()  # what it stamps proves nothing
        assert client.calls == [*AGAIN, *PROVED, *STAMPED]

    asyncio.run(story())


@pytest.mark.parametrize("broken", ["update", "prove"])
def test_who_fails_twice_has_failed(broken):
    async def story():
        error = EndpointUnavailable(URL, "out of luck")
        parts = Parts({broken: failing(error, error)})
        with pytest.raises(ProofFailed, match="out of luck"):
            await parts.reconcile()
        assert parts.client.calls.count("start") == 2
        assert parts.client.version == UPDATING

    asyncio.run(story())


@pytest.mark.parametrize("broken", ["pause", "start", "update", "finish", "resume", "prove"])
def test_who_has_let_the_time_of_all_answers_pass_is_not_pushed_to_again(broken):
    """One limit for everything; each request has its own."""

    async def story():
        silent = NotAnswered(URL, f"{broken} was not answered", 600.0)
        parts = Parts({broken: failing(silent)})
        with pytest.raises(ProofFailed, match=f"{broken} was not answered"):
            await parts.reconcile()
        assert parts.client.calls.count("start") == (broken != "pause")
        short = NotAnswered(URL, "not answered", 10.0)
        parts = Parts({broken: failing(short)})
        await parts.reconcile()

    asyncio.run(story())


@pytest.mark.parametrize("broken", ["update", "prove"])
def test_who_was_given_a_damaged_copy_is_not_to_blame(broken):
    async def story():
        parts = Parts({broken: failing(EndpointError(URL, "checksum"))})
        parts.target.complete(ArtifactInMemory(WEIGHTS, frozenset({"weight-0"})))
        with pytest.raises(DamagedCopy, match="'weight-0' was changed"):
            await parts.reconcile()
        assert parts.pool.events == ["quarantine"] and parts.client.calls.count("start") == 1
        assert parts.client.version == UPDATING

    asyncio.run(story())


def test_who_does_not_answer_any_more_is_gone_and_not_to_blame():
    async def story():
        parts = Parts()

        async def die():
            async def unanswered(timeout_s=None):
                raise EndpointUnavailable(URL, "connection refused")

            parts.client.weight_version = unanswered
            raise EndpointUnavailable(URL, "connection lost")

        parts.client.script["update"] = die
        with pytest.raises(EndpointUnavailable, match="connection lost"):
            await parts.reconcile()
        assert parts.pool.events == []

    asyncio.run(story())


def test_a_restart_just_before_the_stamp_is_noticed():
    async def story():
        parts = Parts()
        client = parts.client

        async def restart():  # the new process takes the stamp, and knows of no trainer
            client.version = VERSION
            client.script.clear()
            raise EndpointUnavailable(URL, "no trainer has announced itself")

        client.script["ask"] = restart
        await parts.reconcile()
        assert client.calls == [*PUSH, *PROVED, *STAMPED, "stamp", *AGAIN, *PROVED, *STAMPED]

    asyncio.run(story())


def test_a_reconciliation_that_is_cancelled_gives_up_before_the_next():
    async def story():
        parts = Parts({"update": asyncio.Event().wait})
        client, parts.target = parts.client, stream(MOST_CHUNKS + 1)
        old = asyncio.ensure_future(parts.reconcile())
        await until(lambda: bool(client.chunks))
        parts.target = stream(1)
        new = asyncio.ensure_future(parts.reconcile())
        await asyncio.sleep(0.05)
        assert client.calls == PUSH[:5]  # the new one waits
        client.script.clear()
        old.cancel()
        await new
        assert client.calls == [*PUSH[:5], "abandon", "resume", *AGAIN, *PROVED, *STAMPED]
        assert old.cancelled()

    asyncio.run(story())


# ---- nobody stays paused -------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["prove", "accept", "reset", "resume"])
def test_who_is_cancelled_between_push_and_resume_goes_on_under_no_version(at):
    async def story():
        parts = Parts({at: asyncio.Event().wait})
        bringing = asyncio.ensure_future(parts.reconcile())
        await until(lambda: at in parts.client.calls)
        assert parts.client.paused
        parts.client.script.clear()
        bringing.cancel()
        await parts.reconciler.end()
        assert not parts.client.paused and parts.client.version == UPDATING
        assert bringing.cancelled()

    asyncio.run(story())


def test_who_is_cancelled_while_it_shows_the_probe_goes_on():
    async def story():
        parts = Parts({"prove": asyncio.Event().wait})
        parts.reconciler.probe = Probe(parts.target, SAID, SAID)
        bringing = asyncio.ensure_future(parts.reconcile())
        await until(lambda: "prove" in parts.client.calls)
        assert parts.client.paused
        bringing.cancel()
        await parts.reconciler.end()
        assert not parts.client.paused

    asyncio.run(story())


def test_the_end_of_a_run_lets_go_what_is_being_repaired():
    async def story():
        batch = MidBatch()
        await batch.publish()
        batch.client.version = "default"  # it has restarted
        batch.client.script["prove"] = asyncio.Event().wait
        repairing = asyncio.ensure_future(batch.return_())
        await until(lambda: "prove" in batch.client.calls)
        assert batch.client.paused
        await batch.confirmed.end()
        assert not batch.client.paused and batch.client.version == UPDATING
        await repairing

    asyncio.run(story())


def test_who_has_left_the_push_unanswered_for_too_long_is_let_go_when_it_is_excluded():
    """Also of the first push, whose bytes nobody has hashed: under a stamp that nobody asks for."""

    async def story():
        parts = Parts({"prove": failing(NotAnswered(URL, "not answered", 600.0))})
        with pytest.raises(ProofFailed, match="not answered"):
            await parts.reconcile()
        assert not parts.client.paused and parts.client.version == UPDATING

    asyncio.run(story())


def test_a_damaged_copy_stays_paused_for_the_next_push_but_not_behind_the_run():
    async def story():
        parts = Parts({"prove": failing(EndpointError(URL, "checksum"))})
        parts.target.complete(ArtifactInMemory(WEIGHTS, frozenset({"weight-0"})))
        with pytest.raises(DamagedCopy):
            await parts.reconcile()
        assert parts.client.paused  # no token is made of the damage
        await parts.reconciler.end()
        assert not parts.client.paused

    asyncio.run(story())


def test_who_was_found_down_and_returns_is_let_go_at_the_end_of_the_run():
    async def story():
        (first, second), fan_out, endpoints = two_endpoints()
        second.script["prove"] = asyncio.Event().wait
        second.script["resume"] = failing(*[EndpointUnavailable(URL, "no route")] * 5)
        running = asyncio.ensure_future(fan_out.run())
        await until(lambda: "prove" in second.calls and "sample" in first.calls)
        endpoints[1].down = "2 health probes unanswered"
        assert (await fan_out.questions()).keys() == {first.url}
        await fan_out.answer({first.url: SAID})
        outcomes = await running
        assert isinstance(outcomes[second.url], EndpointUnavailable) and second.paused
        await fan_out.reconciler.end()
        assert not second.paused and second.version == UPDATING

    asyncio.run(story())


@pytest.mark.parametrize("at", ["prove", "nothing"])
def test_a_publication_that_an_error_ends_leaves_nobody_paused(at):
    """The trainer's error cancels it: while they prove, or before they have begun to."""

    async def story():
        clients, fan_out, endpoints = two_endpoints()
        if at == "nothing":  # all were brought at once, by a broadcast
            pusher = fan_out.reconciler.pusher
            await asyncio.gather(*(pusher.push(e, fan_out.target) for e in endpoints))
        for client in clients:
            client.script["prove"] = asyncio.Event().wait
        running = asyncio.ensure_future(fan_out.run())
        if at == "prove":
            await until(lambda: all("prove" in client.calls for client in clients))
        else:
            await asyncio.sleep(0)
        assert all(client.paused for client in clients)
        running.cancel()
        await fan_out.reconciler.end()
        assert not any(client.paused for client in clients)

    asyncio.run(story())


# ---- canaries that follow the stamp --------------------------------------------------------------


class Following(Parts):
    def reconcile(self, **options):
        self.target.expected = SAID
        known = self.target.known
        return self.reconciler.reconcile(
            self.endpoint, self.target, known, canary_follows=True, **options
        )

    def compare(self, shown: Shown):
        known = self.target.known
        return self.reconciler.compare(self.endpoint, self.target, known, shown)

    async def next(self) -> Shown:
        """The version behind the present one."""
        self.client.version = "run:0:0"  # so that it is pushed to again
        self.reconciler.pusher._given[URL].stamp = "run:0:0"
        self.reconciler.pusher._given[URL].artifact = None
        self.client.calls.clear()
        return await self.reconcile()


def test_a_canary_follows_the_stamp_of_one_that_has_passed_canaries_since_it_started():
    async def story():
        parts = Following()
        assert not (await parts.reconcile()).owes_canary
        assert parts.client.calls == [*PUSH, *PROVED, *STAMPED]
        shown = await parts.next()
        assert shown.owes_canary and shown.reading is None
        assert parts.client.calls == [*PUSH[1:], *PROVED[:-1], "stamp"]
        assert parts.client.version == VERSION
        parts.client.calls.clear()
        assert await parts.compare(shown) is shown
        assert parts.client.calls == ["ask", "sample"]  # whether it has restarted, beside them
        assert not shown.owes_canary and shown.reading == CanaryReading(0.0, 0.0, 0.0, 1)
        await parts.next()
        parts.client.version = "default"  # it restarts
        parts.client.calls.clear()
        assert not (await parts.reconcile()).owes_canary
        assert parts.client.calls == [*PUSH, *PROVED, *STAMPED]

    asyncio.run(story())


def test_a_restart_just_before_a_stamp_that_the_canary_follows_is_noticed_beside_it():
    """The new process takes the stamp, and what it samples is what is expected."""

    async def story():
        parts = Following()
        await parts.reconcile()
        shown = await parts.next()
        parts.endpoint.confirmed_version = VERSION
        unknown = EndpointError(URL, "no trainer has announced itself")
        parts.client.script["ask"] = failing(unknown)
        with pytest.raises(EndpointUnavailable, match="no trainer has announced itself"):
            await parts.compare(shown)
        assert parts.endpoint.confirmed_version is None and "quarantine" in parts.pool.events
        assert parts.client.version == UPDATING
        assert not parts.prover.has_passed(URL)
        assert not (await parts.reconcile()).owes_canary

    asyncio.run(story())


@pytest.mark.parametrize("case", ["bits are not proved", "the probe's weights were last"])
def test_a_canary_comes_first_where_nothing_else_shows_what_is_served(case):
    async def story():
        parts = Following()
        parts.prover.reads_bits = case != "bits are not proved"
        await parts.reconcile()
        if case != "bits are not proved":
            parts.prover.probe_shifts[URL] = 1.0
        assert not (await parts.next()).owes_canary
        assert parts.client.calls.index("sample") < parts.client.calls.index("stamp", 3)

    asyncio.run(story())


def test_one_whose_canary_fails_behind_its_stamp_loses_both_and_is_trusted_no_more():
    async def story():
        parts = Following()
        told = []
        parts.reconciler.on_failed_proof = told.append
        await parts.reconcile()
        shown = await parts.next()
        parts.endpoint.confirmed_version = VERSION
        parts.canary.logprob = -9.0
        with pytest.raises(EndpointUnavailable, match="canary: log-probabilities differ"):
            await parts.compare(shown)
        assert shown.owes_canary
        assert parts.endpoint.confirmed_version is None and "quarantine" in parts.pool.events
        assert parts.client.version == UPDATING  # no rank takes its tokens for the version's
        parts.canary.logprob = -1.0
        assert not (await parts.reconcile()).owes_canary
        assert not (await parts.next()).owes_canary

    asyncio.run(story())


@pytest.mark.parametrize("event", ["restart", "no answer", "silent", "down"])
def test_one_that_is_gone_before_its_canary_has_passed_is_out_of_use_and_not_to_blame(event):
    async def story():
        parts = Following()
        await parts.reconcile()
        shown = await parts.next()
        parts.endpoint.confirmed_version = VERSION
        if event == "restart":
            parts.client.version = "default"
        elif event == "no answer":
            parts.client.script["sample"] = failing(NotAnswered(URL, "no answer", 60.0))
        elif event == "silent":
            gone = EndpointUnavailable(URL, "connection refused")

            async def unanswered(timeout_s=None):
                raise gone

            parts.client.script["sample"] = failing(gone)
            parts.client.weight_version = unanswered
        else:
            parts.client.script["sample"] = asyncio.Event().wait
            parts.endpoint.down = "it hangs"
        with pytest.raises(EndpointUnavailable):
            await parts.compare(shown)
        assert parts.endpoint.confirmed_version is None and "quarantine" in parts.pool.events
        parts.endpoint.down = None
        parts.client.script.clear()
        if event == "silent":
            del parts.client.weight_version
        assert not (await parts.reconcile()).owes_canary
        assert (await parts.next()).owes_canary

    asyncio.run(story())


@pytest.mark.parametrize("away", [False, True])
def test_one_that_was_away_when_a_batch_ended_passes_a_canary_before_one_follows_again(away):
    async def story():
        parts = Following()
        confirmed = ConfirmedEndpoints(parts.pool, parts.prover, parts.reconciler, patience_s=0.01)
        await parts.reconcile()
        await confirmed.confirm(parts.target, {URL: Shown()})
        if away:  # its version and weights are still right when it answers again
            parts.endpoint.confirmed_version = None
        await confirmed.withdraw()
        assert (await parts.next()).owes_canary == (not away)

    asyncio.run(story())


# ---- proofs that fail in mid-batch ---------------------------------------------------------------


class MidBatch(Parts):
    """An endpoint that has confirmed the open batch's version and has a request in flight."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.told: list[tuple[str, int]] = []
        self.confirmed = ConfirmedEndpoints(
            self.pool, self.prover, self.reconciler, patience_s=0.01, **options
        )
        self.confirmed.on_failed_proof = self.tell

    async def publish(self) -> None:
        await self.reconcile()
        await self.confirmed.withdraw()
        await self.confirmed.confirm(self.target, {URL: Shown()})
        self.in_flight = asyncio.ensure_future(asyncio.Event().wait())
        self.endpoint.attempts[self.in_flight] = None
        self.client.calls.clear()

    def tell(self, url: str, proof: int) -> None:
        assert self.endpoint.attempts[self.in_flight] is not None
        assert self.endpoint.confirmed_version is None
        self.told.append((url, proof))

    async def return_(self) -> None:
        self.endpoint.confirmed_version = None  # it was down, and answers again
        await self.confirmed.repair(self.endpoint)


@pytest.mark.parametrize("wrong", ["bits", "canary"])
def test_a_return_that_fails_its_proof_is_told_with_the_last_good_proof(wrong):
    async def story():
        batch = MidBatch()
        await batch.publish()
        await batch.return_()  # well, so far
        assert batch.endpoint.proof == 2 and batch.told == []
        if wrong == "bits":
            batch.client.served = WRONG
        else:
            batch.canary.logprob = -3.0

        async def heal():
            batch.client.served = WEIGHTS
            batch.canary.logprob = -1.0

        batch.client.script["start"] = heal
        batch.client.calls.clear()
        await batch.return_()
        assert batch.told == [(URL, 2)]
        shown = ["prove"] if wrong == "bits" else KEPT
        # no token under the version from the failure on
        assert batch.client.calls == [*shown, "stamp", *AGAIN, *PROVED, *STAMPED]
        assert batch.endpoint.confirmed_version == VERSION and batch.endpoint.proof == 3
        await asyncio.wait([batch.in_flight])
        assert batch.in_flight.cancelled()

    asyncio.run(story())


def test_it_is_told_once_of_one_that_fails_for_good():
    async def story():
        batch = MidBatch()
        await batch.publish()
        batch.client.served = WRONG
        with pytest.raises(ProofFailed, match="serves other weights"):
            await batch.return_()
        assert batch.told == [(URL, 1)]
        assert batch.client.version == UPDATING

    asyncio.run(story())


@pytest.mark.parametrize("event", ["restart", "no answer", "new"])
def test_what_is_no_failed_proof_is_not_told(event):
    async def story():
        batch = MidBatch()
        await batch.publish()
        if event == "restart":
            batch.client.version = "default"
        elif event == "no answer":
            batch.client.script["prove"] = failing(EndpointError(URL, "busy"))
        else:  # came in this batch: nothing was generated by it
            await batch.confirmed.confirm(batch.target, {})
            batch.endpoint.confirmed_version = None
            batch.client.served = WRONG
            with pytest.raises(ProofFailed):
                await batch.return_()
            assert batch.told == []
            return
        await batch.return_()
        assert batch.told == [] and batch.endpoint.confirmed_version == VERSION

    asyncio.run(story())


def test_another_rank_tells_it_too_and_waits_for_rank_zero():
    async def story():
        batch = MidBatch()
        await batch.publish()
        other = ConfirmedEndpoints(batch.pool, batch.prover, None, patience_s=0.01)
        other.on_failed_proof = batch.tell
        await other.confirm(batch.target, {URL: Shown()})
        batch.client.served = WRONG
        batch.endpoint.confirmed_version = None
        with pytest.raises(EndpointUnavailable, match="serves other weights"):
            await other.repair(batch.endpoint)
        assert batch.told == [(URL, 2)]
        assert set(batch.client.calls) == {"prove"}  # it touches nothing

    asyncio.run(story())


def test_a_repair_that_a_new_target_overtakes_goes_on_with_that():
    async def story():
        batch = MidBatch()
        await batch.publish()
        batch.client.version = "default"
        batch.client.script["update"] = asyncio.Event().wait
        repairing = asyncio.ensure_future(batch.return_())
        await until(lambda: "update" in batch.client.calls)
        await batch.confirmed.withdraw()
        batch.client.script.clear()
        await until(lambda: batch.client.calls[-2:] == ["abandon", "resume"])
        assert not repairing.done()
        await batch.confirmed.confirm(batch.target, {})
        await repairing
        assert batch.endpoint.confirmed_version == VERSION

    asyncio.run(story())


# ---- all endpoints at once -----------------------------------------------------------------------


def two_endpoints() -> tuple[list[ScriptedClient], FanOut, list[Endpoint]]:
    clients = [ScriptedClient() for _ in range(2)]
    clients[1].url = URL + "-2"
    endpoints = [Endpoint(client, 1) for client in clients]
    prover = Prover(ScriptedCanary(*clients), tolerance=0.1, reads_bits=True)

    class Everywhere(Announcer):
        async def init_info(self, url):
            return {"to": URL}

    reconciler = Reconciler(FakePool(*endpoints), WeightPusher(Everywhere()), prover)
    return clients, FanOut(reconciler, endpoints, stream(1), canary=True), endpoints


def test_the_trainer_is_asked_when_all_wait_for_it_or_have_ended():
    async def story():
        (first, second), fan_out, _ = two_endpoints()
        gate = asyncio.Event()
        second.script["update"] = gate.wait
        running = asyncio.ensure_future(fan_out.run())
        asking = asyncio.ensure_future(fan_out.questions())
        await until(lambda: "sample" in first.calls)
        await asyncio.sleep(0.01)
        assert not asking.done()
        gate.set()
        samples = await asking
        assert samples.keys() == {first.url, second.url}
        wrong = Expected(SAID.token_ids, (np.array([-2.0], np.float32),))
        await fan_out.answer({first.url: SAID, second.url: wrong})
        samples = await fan_out.questions()  # pushed again, and asked again
        assert samples.keys() == {second.url}
        await fan_out.answer({second.url: SAID})
        assert await fan_out.questions() == {}
        outcomes = await running
        assert outcomes.keys() == {first.url, second.url}
        assert all(isinstance(outcome, Shown) for outcome in outcomes.values())
        assert first.version == second.version == VERSION

    asyncio.run(story())


def test_one_that_goes_down_while_it_waits_for_the_trainer_holds_nobody_up():
    async def story():
        (first, second), fan_out, endpoints = two_endpoints()
        running = asyncio.ensure_future(fan_out.run())
        assert len(await fan_out.questions()) == 2
        endpoints[1].down = "2 health probes unanswered"
        await asyncio.sleep(0.3)
        await fan_out.answer(dict.fromkeys([first.url, second.url], SAID))
        assert await fan_out.questions() == {}
        outcomes = await running
        assert isinstance(outcomes[first.url], Shown)
        assert isinstance(outcomes[second.url], EndpointUnavailable)
        assert second.version == UPDATING

    asyncio.run(story())


async def slow() -> None:
    """An answer that comes in time, of so many that the others wait for ever."""
    await asyncio.sleep(0.01)


@pytest.fixture
def no_patience(monkeypatch):
    monkeypatch.setattr("easyrl.weight_sync.fan_out.GIVING_UP_S", 0.0)
    monkeypatch.setattr("easyrl.weight_sync.fan_out.WATCH_INTERVAL_S", 0.005)


@pytest.mark.parametrize("late_at", ["push", "stamp"])
def test_one_whose_answers_come_in_time_keeps_others_waiting_only_so_long(late_at, no_patience):
    async def story():
        (first, second), fan_out, endpoints = two_endpoints()
        reconciler = fan_out.reconciler
        reconciler.timeout_s = 0.02
        gate = asyncio.Event()
        if late_at == "push":
            second.script["update"] = gate.wait
        running = asyncio.ensure_future(fan_out.run())
        async with asyncio.timeout(5):
            asked = await fan_out.questions()
            assert asked.keys() == {first.url} | ({second.url} if late_at == "stamp" else set())
            await asyncio.sleep(0.05)  # the trainer takes its time: nobody is late for that
            assert reconciler.waited_for(endpoints) == endpoints[: len(asked)]
            second.script["stamp"] = gate.wait
            await fan_out.answer(dict.fromkeys(asked, SAID))
            assert await fan_out.questions() == {}
            outcomes = await running
        assert isinstance(outcomes[first.url], Shown)
        error = outcomes[second.url]
        assert isinstance(error, EndpointUnavailable) and "weight_sync.timeout_s" in error.reason
        assert reconciler.pool.events[-1] == "set aside"
        assert second.version == UPDATING
        assert reconciler.waited_for(endpoints) == endpoints[:1]
        assert reconciler.waited_for(endpoints[1:]) == endpoints[1:]  # nobody else is there

    asyncio.run(story())


def test_one_that_nobody_waits_for_has_its_time(no_patience):
    async def story():
        (first, _), fan_out, endpoints = two_endpoints()
        fan_out = FanOut(fan_out.reconciler, endpoints[:1], stream(1), canary=True)
        fan_out.reconciler.timeout_s = 0.01
        first.script = dict.fromkeys([*PUSH, "prove", "ask"], slow)
        running = asyncio.ensure_future(fan_out.run())
        assert len(await fan_out.questions()) == 1
        await fan_out.answer({first.url: SAID})
        assert isinstance((await running)[first.url], Shown)
        assert fan_out.reconciler.pool.events == []

    asyncio.run(story())


def test_one_that_is_in_time_in_mid_batch_is_waited_for_again_but_not_for_ever():
    async def story():
        parts = Parts()
        others = [Endpoint(ScriptedClient(), 1)]
        others[0].url = URL + "-2"
        both = [parts.endpoint, *others]
        for times in range(1, MOST_LATE + 1):
            parts.reconciler.late(parts.endpoint, VERSION)
            parts.reconciler.late(parts.endpoint, VERSION)  # looked at twice
            parts.endpoint.down = None
            assert parts.reconciler.waited_for(both) == others
            await parts.reconcile()
            assert parts.reconciler.waited_for(both) == (both if times < MOST_LATE else others)

    asyncio.run(story())
