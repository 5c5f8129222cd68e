"""What guards a certificate against being written anew: the published hash, and seals by a key."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from easyrl.__main__ import command_line
from easyrl.build.ledger import load_seal_key
from easyrl.config import ConfigError
from easyrl.ledger.certificate.chain import chain_hash
from easyrl.ledger.certificate.errors import CertificateError, OtherSettings
from easyrl.ledger.certificate.seal import SealKey, read_seal_key
from easyrl.ledger.verify import verify
from tests.easyrl.ledger.certified_run import RUN, URLS, CertifiedRun, confirmation

KEY = SealKey(b"0123456789abcdef")
OTHER = SealKey(b"fedcba9876543210")


def complete(folder: Path, key: SealKey | None) -> CertifiedRun:
    run = CertifiedRun(folder, key=key)
    run.begin()
    run.train_all()
    return run


def rewrite(run: CertifiedRun) -> None:
    """All lines anew, with another number in batch 0."""
    import msgspec

    run.forge_batch(0, lambda record: msgspec.structs.replace(record, logprob_max=1e-3))


# ---- the published hash --------------------------------------------------------------------------


def test_a_certificate_that_was_written_anew_has_not_the_published_hash(tmp_path):
    run = complete(tmp_path, None)
    published = run.certificate.chain_hash
    assert published == chain_hash(run.certificate_path)
    verdict = verify(tmp_path, chain=published)
    assert verdict.on_policy and verdict.published == verdict.lines == 6
    rewrite(run)
    assert verify(tmp_path).on_policy  # a whole chain again: nothing in the folder shows it
    verdict = verify(tmp_path, chain=published)
    assert "no line has the published hash" in str(verdict.violation)


def test_a_run_that_went_on_still_has_the_line_that_was_published(tmp_path):
    run = CertifiedRun(tmp_path)
    run.begin()
    run.train()
    run.certificate.close()
    published = run.certificate.chain_hash
    run.save(1)
    run.begin(1)
    run.train_all()
    verdict = verify(tmp_path, chain=published)
    assert verdict.on_policy and (verdict.published, verdict.lines) == (3, 7)


def test_an_answer_that_its_weights_do_not_give_is_a_violation(tmp_path):
    run = complete(tmp_path, None)
    right = {str(v): run_answers(run, v) for v in range(3)}
    verdict = verify(tmp_path, answers_of=lambda version, _, proof: right[version[-1]])
    assert verdict.on_policy and verdict.recomputed == verdict.proofs == 6
    right["1"] = "0" * 64
    violation = verify(tmp_path, answers_of=lambda version, _, proof: right[version[-1]]).violation
    assert (violation.batch, violation.endpoint) == (1, URLS[0])
    assert "its weights give 0000" in str(violation)


def run_answers(run: CertifiedRun, v: int) -> str:
    return confirmation(URLS[0], f"{RUN}:0:{v}").proof.answers


# ---- seals ---------------------------------------------------------------------------------------


def test_sealed_lines_are_checked_with_their_key_only(tmp_path):
    run = complete(tmp_path, KEY)
    verdict = verify(tmp_path, key=KEY)
    assert verdict.on_policy and verdict.sealed and verdict.seals_checked
    verdict = verify(tmp_path)
    assert verdict.on_policy and verdict.sealed and not verdict.seals_checked
    violation = verify(tmp_path, key=OTHER).violation
    assert violation.line == 1 and "was not made with this key" in str(violation)
    assert b"0123456789abcdef" not in run.certificate_path.read_bytes()
    assert "0123456789abcdef" not in repr(vars(run))


@pytest.mark.parametrize("forger", [None, OTHER], ids=["no key", "another key"])
def test_who_has_not_the_key_cannot_write_a_sealed_certificate_anew(forger, tmp_path):
    run = complete(tmp_path, KEY)
    run.key = forger
    rewrite(run)
    assert verify(tmp_path).on_policy
    violation = verify(tmp_path, key=KEY).violation
    assert violation.line == 1 and "seal" in str(violation)


@pytest.mark.parametrize("change", ["seal", "removed", "digest"])
def test_a_line_whose_seal_was_changed(change, tmp_path):
    run = complete(tmp_path, KEY)
    lines = run.lines()
    line = lines[2]
    if change == "seal":
        lines[2] = line[:-5] + (b"0" if line[-5:-4] != b"0" else b"1") + line[-4:]
    elif change == "removed":
        lines[2] = line[: line.index(b',"seal"')] + b"}\n"
    else:
        at = line.index(b',"seal"') - 3
        lines[2] = line[:at] + (b"0" if line[at : at + 1] != b"0" else b"1") + line[at + 1 :]
    run.write_lines(lines)
    assert verify(tmp_path, key=KEY).violation.line == 3
    assert not verify(tmp_path).on_policy  # the line behind it follows another one


def test_a_sealed_line_that_was_cut_off_is_none(tmp_path):
    run = complete(tmp_path, KEY)
    lines = run.lines()
    run.write_lines([*lines[:-1], lines[-1][:-10]])
    verdict = verify(tmp_path, key=KEY)
    assert verdict.on_policy and verdict.torn and not verdict.ended


@pytest.mark.parametrize(
    ("began", "goes_on", "problem"),
    [
        (KEY, None, "the run is sealed: go on with --seal"),
        (None, KEY, "the run was begun without --seal"),
        (KEY, OTHER, "its seal was not made with this key"),
    ],
)
def test_a_run_goes_on_with_the_key_that_it_began_with(began, goes_on, problem, tmp_path):
    run = complete(tmp_path, began)
    before = run.certificate_path.read_bytes()
    run.key = goes_on
    with pytest.raises(CertificateError, match=problem) as caught:
        run.begin(1)
    assert isinstance(caught.value, OtherSettings) == (goes_on is not OTHER)
    assert run.certificate_path.read_bytes() == before


# ---- the key file --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read"),
        (b"", "holds 0 bytes, a key has at least 16; make one with: openssl rand -hex 32"),
        (b" 012345678901234\n", "holds 15 bytes"),
    ],
)
def test_a_key_file_that_cannot_be_used(content, problem, tmp_path):
    file, run_dir = tmp_path / "key", tmp_path / "run"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=f"--seal: .*key.* {problem}"):
        read_seal_key(file, run_dir)
    with pytest.raises(ConfigError, match="--seal"):
        load_seal_key(file, run_dir, resume=False)


def test_a_key_in_the_runs_folder_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "key").write_bytes(b"0" * 64)
    (tmp_path / "linked").symlink_to(tmp_path / "run" / "key")
    for file in (tmp_path / "run" / "key", tmp_path / "linked"):
        with pytest.raises(ValueError, match="lies in the run's folder"):
            read_seal_key(file, tmp_path / "run")


def test_white_space_around_a_key_does_not_matter(tmp_path):
    seals = set()
    for number, content in enumerate((b"0" * 64, b"0" * 64 + b"\n")):
        (tmp_path / f"key{number}").write_bytes(content)
        seals.add(read_seal_key(tmp_path / f"key{number}", tmp_path / "run").seal(b"line"))
    assert len(seals) == 1


def test_a_resume_is_refused_before_anything_is_loaded(tmp_path):
    file = tmp_path / "key"
    file.write_bytes(b"0" * 64)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    complete(run_dir, read_seal_key(file, run_dir))
    assert load_seal_key(file, run_dir, resume=True) is not None
    with pytest.raises(ConfigError, match="the run is sealed"):
        load_seal_key(None, run_dir, resume=True)


def test_the_command_checks_seals_and_the_published_hash(tmp_path):
    file = tmp_path / "key"
    file.write_bytes(b"0" * 64)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run = complete(run_dir, read_seal_key(file, run_dir))

    def call(*options: str):
        return CliRunner().invoke(command_line(), ["verify", str(run_dir), *options])

    published = chain_hash(run.certificate_path)
    good = call("--seal", str(file), "--chain", published)
    assert good.exit_code == 0
    told = good.stdout.splitlines()[-1]
    assert told.startswith(f"certificate {published} ") and "seals checked, line 6 of 6" in told
    assert "checked with --seal KEYFILE" in call().stdout
    assert call("--chain", "0" * 32).exit_code == 1
    none = call("--seal", str(tmp_path / "absent"))
    assert none.exit_code == 2 and "absent cannot be read" in none.stderr
