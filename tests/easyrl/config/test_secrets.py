"""Secrets of a configuration stay in the environment: files, trackers and messages have names."""

from __future__ import annotations

import pytest
import yaml

from easyrl.config import ConfigError
from easyrl.config.file import dump_config, load_config, plain_secrets, public_tree
from easyrl.config.secrets import REDACTED, is_secret_key, redact
from tests.easyrl.config.test_config import MINIMAL, load

KEY = "MARKED-sk-1234"


@pytest.fixture(autouse=True)
def _variables(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setenv("NUM_SEQS", "12")
    monkeypatch.delenv("UNSET", raising=False)


def rewards(kwargs: str) -> str:
    return f"rewards=[{{name: math, kwargs: {{{kwargs}}}}}]"


@pytest.mark.parametrize(
    "name",
    ["key", "api_key", "HF_TOKEN", "token", "judge-secret", "password", "apiKey", "OPENAI_API_KEY"]
    + ["X-Auth", "Cookie", "auth", "bearer", "pwd", "pat", "api_keys", "tokens", "hf_tokens"]
    + ["PGPASS", "PGPASSWORD", "db_pass", "private_key_pem", "hf_token_value", "api_key_2"]
    + ["db.password", "AWS_SECRET_ACCESS_KEY", "Authorization", "hf-token", "APIKEY", "secrets"],
)
def test_names_of_secrets(name):
    assert is_secret_key(name)


@pytest.mark.parametrize(
    "name",
    ["max_tokens", "tokenizer", "stop_token_ids", "eos_token", "keys", "monkey", "api_key_env"]
    + ["num_tokens", "min_tokens", "special_tokens", "stop_tokens", "tokenizer_path", "sort_keys"]
    + ["key_value", "token_value", "bypass", "num_key_value_heads", "author", "path", "pattern"]
    + ["token_ids", "auth_type", "compass", "eos_token_text", "max_prompt_tokens", "dispatch"]
    + ["k_proj", "keyword", "tokens_per_second", "", "answer_key", "ssl_keyfile", "hockey"],
)
def test_names_of_other_things(name):
    assert not is_secret_key(name)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"a": {"api_key": "x", "n": 1}}, {"a": {"api_key": REDACTED, "n": 1}}),
        ({"password": 1234, "token": None}, {"password": REDACTED, "token": None}),
        ({"secrets": {"a": "x", "b": ["y"]}}, {"secrets": {"a": REDACTED, "b": [REDACTED]}}),
        (["--hf-token=x", "--port=1"], [f"--hf-token={REDACTED}", "--port=1"]),
        (["--hf-token", "x", "y"], ["--hf-token", REDACTED, "y"]),
        (["--hf-token", "--port", "x"], ["--hf-token", "--port", "x"]),
        ({"headers": {"X-Auth": "x", "Cookie": "y", "Accept": "z"}},
         {"headers": {"X-Auth": REDACTED, "Cookie": REDACTED, "Accept": "z"}}),
        ({"api_keys": ["x", "y"], "tokens": 2048, "total_tokens": 5},
         {"api_keys": [REDACTED, REDACTED], "tokens": 2048, "total_tokens": 5}),
        ({"tokens": {"a": "x"}, "auth": ["me", "x"]},
         {"tokens": {"a": REDACTED}, "auth": [REDACTED, REDACTED]}),
        (["--header=Authorization: Bearer x"], [f"--header=Authorization: {REDACTED}"]),
        (["--header", "X-Api-Key: x"], ["--header", f"X-Api-Key: {REDACTED}"]),
        (["-e", "HF_TOKEN=x", "--env=HF_TOKEN=x", "TP=2"],
         ["-e", f"HF_TOKEN={REDACTED}", f"--env=HF_TOKEN={REDACTED}", "TP=2"]),
        (["--db-url", "pg://me:x@h/db"], ["--db-url", f"pg://{REDACTED}@h/db"]),
        ({"url": "https://me:x@h:1/a"}, {"url": f"https://{REDACTED}@h:1/a"}),
        ({"url": "https://x@h/a"}, {"url": f"https://{REDACTED}@h/a"}),
        ({"url": "pg://me:x/y@z@h/a"}, {"url": f"pg://{REDACTED}@h/a"}),
        ({"url": "https://h/a?n=1&api_key=x&m=2"}, {"url": f"https://h/a?n=1&api_key={REDACTED}&m=2"}),
        ({"url": "https://h/a?key=x#y"}, {"url": f"https://h/a?key={REDACTED}#y"}),
        ({"dsn": "host=h password=x user=me"}, {"dsn": f"host=h password={REDACTED} user=me"}),
        ({"note": "curl -H 'Authorization: Bearer x y' h"},
         {"note": f"curl -H 'Authorization: {REDACTED}' h"}),
        ({"note": "Bearer sk-1234567"}, {"note": f"Bearer {REDACTED}"}),
        ({"pem": "-----BEGIN RSA PRIVATE KEY-----\nx\n"}, {"pem": REDACTED}),
        (["--max-tokens=5", "--tokenizer", "x"], ["--max-tokens=5", "--tokenizer", "x"]),
    ],
)  # fmt: skip
def test_redacted_by_name(values, expected):
    assert redact(values) == expected


@pytest.mark.parametrize(
    "text",
    [
        "http://h:8000", "http://h:8000/path@v1", "ssh://git@github.com/a", "me@example.org",
        "Answer with the key: value pairs", "sorted(x, key=len)", "max_tokens=5",
        "The bearer of bad news", "s3://bucket/a?versionId=3", "{{ eos_token }}",
        "key=value", "Think step by step: first, ...", "http://[::1]:8000/a",
    ],
)  # fmt: skip
def test_texts_without_a_secret_stay_as_they_are(text):
    for values in ({"a": text}, [text], ["--option=" + text], ["--option", text]):
        assert redact(values) == values


def test_a_message_about_an_override_shows_no_secret():
    with pytest.raises(ConfigError) as caught:
        load_config(
            "benchmarks/overlap.yaml", ["inference.endpoints=[http://bob:MARKED@[::1]:8000]"]
        )
    assert "MARKED" not in str(caught.value) and "inference.endpoints" in str(caught.value)


def test_a_secret_inside_a_text_is_asked_for_again(tmp_path):
    dumped = dump_config(load(tmp_path, MINIMAL, rewards("url: 'http://me:MARKED@h/a'")))
    assert "MARKED" not in dumped
    with pytest.raises(ConfigError, match=r"rewards\[0\].kwargs.url: was a secret in plain text"):
        load(tmp_path, dumped)


@pytest.mark.parametrize(
    ("override", "value", "written"),
    [
        ("api_key: '${oc.env:JUDGE_KEY}'", KEY, "${oc.env:JUDGE_KEY}"),
        ("note: 'Bearer ${oc.env:JUDGE_KEY}'", f"Bearer {KEY}", "Bearer ${oc.env:JUDGE_KEY}"),
        ("note: '${oc.env:UNSET,by default}'", "by default", "${oc.env:UNSET,by default}"),
        ("note: '${oc.env:UNSET,${oc.env:JUDGE_KEY}}'", KEY, "${oc.env:UNSET,${oc.env:JUDGE_KEY}}"),
        ("note: '${oc.decode:${oc.env:NUM_SEQS}}'", 12, "${oc.decode:${oc.env:NUM_SEQS}}"),
        ("note: '\\${a} ${oc.env:JUDGE_KEY}'", f"${{a}} {KEY}", "\\${a} ${oc.env:JUDGE_KEY}"),
        ("note: '\\${oc.env:JUDGE_KEY}'", "${oc.env:JUDGE_KEY}", "\\${oc.env:JUDGE_KEY}"),
        ("note: '${oc.env:UNSET,${run.name}}-${oc.env:JUDGE_KEY}'", f"easyrl-{KEY}",
         "${oc.env:UNSET,${run.name}}-${oc.env:JUDGE_KEY}"),
    ],
)  # fmt: skip
def test_a_variable_keeps_its_name(tmp_path, override, value, written):
    text = MINIMAL + "run: {name: easyrl}\n"
    config = load(tmp_path, text, rewards(override))
    (found,) = config.rewards[0].kwargs.values()
    assert found == value
    (said,) = public_tree(config)["rewards"][0]["kwargs"].values()
    assert said == written
    dumped = dump_config(config)
    assert KEY not in dumped
    again = load(tmp_path, dumped)
    assert again == config and dump_config(again) == dumped


def test_what_refers_to_it_keeps_the_name_too(tmp_path):
    text = MINIMAL + "run: {wandb_project: '${oc.env:JUDGE_KEY}', name: a}\n"
    config = load(tmp_path, text, rewards("note: '${run.wandb_project}/${run.name}'"))
    assert config.rewards[0].kwargs == {"note": f"{KEY}/a"}
    dumped = dump_config(config)
    assert KEY not in dumped
    assert yaml.safe_load(dumped)["rewards"][0]["kwargs"] == {"note": "${oc.env:JUDGE_KEY}/a"}
    assert load(tmp_path, dumped).rewards == config.rewards


def test_the_value_is_that_of_the_environment_now(tmp_path, monkeypatch):
    dumped = dump_config(load(tmp_path, MINIMAL, rewards("api_key: '${oc.env:JUDGE_KEY}'")))
    monkeypatch.setenv("JUDGE_KEY", "another")
    assert load(tmp_path, dumped).rewards[0].kwargs == {"api_key": "another"}
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="JUDGE_KEY"):
        load(tmp_path, dumped)


def test_a_secret_in_plain_text_is_left_out_and_asked_for_again(tmp_path):
    options = [
        rewards(f"api_key: {KEY}, top: 3"),
        f"inference.launch.options=['--hf-token={KEY}']",
    ]
    launch = "inference.launch={engine: embedded, env: {HF_TOKEN: " + KEY + "}}"
    config = load(tmp_path, MINIMAL, launch, *options)
    assert plain_secrets(config) == [
        *("inference.launch.options[0]", "inference.launch.env.HF_TOKEN"),
        "rewards[0].kwargs.api_key",
    ]
    dumped = dump_config(config)
    assert KEY not in dumped and "top: 3" in dumped
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, dumped)
    for key in ("rewards[0].kwargs.api_key", "inference.launch.env.HF_TOKEN", "options[0]"):
        assert f"{key}: was a secret in plain text" in str(caught.value)
    assert "${oc.env:NAME}" in str(caught.value)
    again = [
        rewards(f"api_key: {KEY}, top: 3"),
        "inference.launch.env.HF_TOKEN=${oc.env:JUDGE_KEY}",
    ]
    again += [f"inference.launch.options=['--hf-token={KEY}']"]
    config = load(tmp_path, dumped, *again)
    assert config.rewards[0].kwargs == {"api_key": KEY, "top": 3}
    assert "inference.launch.env.HF_TOKEN" not in plain_secrets(config)


def test_the_default_of_a_secret_is_one_too(tmp_path):
    config = load(tmp_path, MINIMAL, rewards("api_key: '${oc.env:UNSET,MARKED-default}'"))
    assert config.rewards[0].kwargs == {"api_key": "MARKED-default"}
    assert "MARKED" not in dump_config(config)


def test_a_finished_run_can_be_looked_at_without_its_secrets(tmp_path, monkeypatch):
    kwargs = "api_key: plain-MARKED, note: '${oc.env:JUDGE_KEY}'"
    file = tmp_path / "kept.yaml"
    file.write_text(dump_config(load(tmp_path, MINIMAL, rewards(kwargs))))
    monkeypatch.delenv("JUDGE_KEY")
    found = load_config(file, to_look_back=True).rewards[0].kwargs
    assert found == {"api_key": REDACTED, "note": "${oc.env:JUDGE_KEY}"}


@pytest.mark.parametrize(
    "override",
    [
        "inference.api_key_env=" + KEY,
        "inference.endpoints=[{url: 'http://a:1', api_key_env: " + KEY + "}]",
        "inference.endpoints=['${oc.env:JUDGE_KEY}']",
        "trainer.batch_size=${oc.env:JUDGE_KEY}",
        "inference.launch={engine: embedded, env: {HF_TOKEN: {" + KEY + ": 1}}}",
        "inference.launch={engine: embedded, env: {HF_TOKEN: 123456789012}}",
    ],
)
def test_messages_show_no_secret(tmp_path, override):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, MINIMAL, override)
    assert "MARKED" not in str(caught.value) and "123456789012" not in str(caught.value)
    assert override.partition("=")[0] in str(caught.value)
