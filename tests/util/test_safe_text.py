from __future__ import annotations

import json
import urllib.parse
from argparse import Namespace
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from helpers.checkpoint_files import Alone
from shoal.checkpoint import Checkpoints
from shoal.telemetry.events import Events
from shoal.util.errors import ShoalError
from shoal.util.safe_text import MASK, is_secret, masked, printable, shown


def test_terminals_show_and_do_not_obey() -> None:
    safe = {
        "plain, [bold]brackets[/] and ünïcödé 鱼\t.": "plain, [bold]brackets[/] and ünïcödé 鱼\t.",
        "\x1b[2J\x1b]0;title\x07": "\\x1b[2J\\x1b]0;title\\x07",
        "two\nlines\r": "two\\nlines\\r",
        "\x9b31m\u2028\u202egpj.exe": "\\x9b31m\\u2028\\u202egpj.exe",
        "\u200fabc\u061c": "\\u200fabc\\u061c",
        "\ud800": "\\ud800",
    }
    assert {text: printable(text) for text in safe} == safe
    error = ShoalError(given="\x1b[31mred", found="one\ntwo\x07", fix="type\x00")
    assert str(error) == "\ngiven: \\x1b[31mred\nfound: one\ntwo\\x07\nfix:   type\\x00"


SECRET = """
token HF_TOKEN WANDB_API_KEY apiKey apikey api-key AWS_SECRET_ACCESS_KEY password dbPassword PGPASSWORD
passwd passphrase credentials auth.bearer DB_PASS MYSQL_PWD SSHPASS GITHUB_PAT hftoken authorization
pwd db.pwd dbPwd pw PW db_pw smtpPw tok hf_tok accessTok private private_pem privateKey credential
gcp-credentials
"""
PUBLIC = """
tokenizer keep keyboard author secretary monkey lr hockey PWD OLDPWD tokenize tokenizers tok_embeddings
stok power pw_conv pwr spw privately deprivate backward network patch path compat
"""


def test_names_of_secrets() -> None:
    assert [name for name in SECRET.split() if not is_secret(name)] == []
    assert [name for name in (*PUBLIC.split(), "", 3, None) if is_secret(name)] == []


def test_masking_goes_to_any_depth_and_takes_texts_alone() -> None:
    given: dict[str, Any] = {
        "tokens": 5,
        "lr": 0.1,
        "nested": [{"api_key": "abc", "name": "x"}, ("https://me:pw@host/x", "ssh://host")],
        "secrets": {"a": "b", "deep": ["c", 1]},
        "token": "",
        "arguments": ["train.py", "--hf-token", "abc", "--password=abc", "--lr", "x"],
    }
    assert masked(given) == {
        "tokens": 5,
        "lr": 0.1,
        "nested": [{"api_key": MASK, "name": "x"}, (f"https://{MASK}@host/x", "ssh://host")],
        "secrets": {"a": MASK, "deep": [MASK, 1]},
        "token": "",
        "arguments": ["train.py", "--hf-token", MASK, f"--password={MASK}", "--lr", "x"],
    }
    assert given["secrets"]["a"] == "b"
    ordered = OrderedDict(key="x", n=1)
    assert masked(ordered) == OrderedDict(key=MASK, n=1)
    assert type(masked(ordered)) is OrderedDict


class Login(NamedTuple):
    user: str
    token: str


@dataclass
class Settings:
    rate: float
    login: Any


class Own(dict[str, Any]):
    """A configuration of another library."""


@pytest.mark.parametrize(
    "value",
    [
        {"login": {"token": "s3cret"}},
        [{"deep": [{"db": {"pw": "s3cret"}}]}],
        {"login": ("ssh", {"tok": "s3cret"})},
        Own(private="s3cret"),
        {"x": Own(pwd="s3cret")},
        Login("me", "s3cret"),
        Settings(0.1, {"credential": "s3cret"}),
        {"a": Settings(0.1, Login("me", "s3cret"))},
        SimpleNamespace(apiKey="s3cret"),
        Namespace(hf_token=Path("s3cret")),
        {"key": b"s3cret"},
        ["train.py", "--hf-token", "s3cret"],
        {"remote": ["https://me:s3cret@host/x"]},
    ],
)
def test_the_text_of_a_value_has_no_secret(value: object) -> None:
    text = shown(value)
    assert "s3cret" not in text
    assert MASK in text


@pytest.mark.parametrize(
    "value", [None, {"a": [1, 0.5, "x"]}, Settings(0.1, ("a",)), torch.ones(2), {"token": 5}, {1, 2}]
)
def test_the_text_of_a_value_without_secrets_is_its_own(value: object) -> None:
    assert shown(value) == str(value)


def test_neither_events_nor_checkpoints_keep_secrets(tmp_path: Path) -> None:
    settings = {"hf_token": "s3cret", "remote": "https://user:s3cret@host", "lr": 0.1}
    events = Events(tmp_path / "rank-0.jsonl")
    events.write("start", {"settings": settings})  # type: ignore[dict-item]
    events.close()
    path = Checkpoints(tmp_path, Alone()).save(1, {"weight": torch.ones(2)}, {}, {"config": settings})
    written = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert len(written) == 4
    assert not any(b"s3cret" in content for content in written)
    assert json.loads((tmp_path / "rank-0.jsonl").read_text())["settings"]["lr"] == 0.1
    loaded = Checkpoints(tmp_path, Alone()).restore()
    assert loaded is not None
    assert loaded.path == path
    assert urllib.parse.urlsplit(loaded.info["config"]["remote"]).hostname == "host"
