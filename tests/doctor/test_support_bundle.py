"""The archive for support: what is in it, and above all what is not."""

from __future__ import annotations

import errno
import getpass
import json
import socket
import stat
import zipfile
from pathlib import Path

import pytest

from shoal.tools.doctor import support_bundle
from shoal.tools.doctor.findings import Examination, failure, ok
from shoal.tools.doctor.support_bundle import LINES, Redactor, collect_bundle, stand_ins, write_bundle
from shoal.util.errors import LaunchError

# Each is planted where one finds it, and must be nowhere in the archive.
SECRETS = {
    "HF_TOKEN": "correct-horse-battery",
    "SLURM_JWT_KEY": 'quoted"and\\slashed',
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "OMPI_MCA_password": "hunter22",
}
LOGIN = "proxypass99"
IN_LOGS = (
    "hf_abcdefghijklmnopqrst",
    "ghp_0123456789abcdefghijABCDEFGHIJ",
    "AKIAIOSFODNN7EXAMPLE",
    "swordfish1",
    "opensesame2",
    "cGFzc3dvcmQ6eHl6",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcDEF",
)
LOG = f"""step 1 loss 0.5 tokens: 4096
using {IN_LOGS[0]} and {IN_LOGS[1]} then {IN_LOGS[2]}
retry: url=https://me:{LOGIN}@example.org/data password="{IN_LOGS[3]}" next=1
python train.py --api-key {IN_LOGS[4]} --steps 10
Authorization: Bearer {IN_LOGS[5]}
jwt {IN_LOGS[6]}
"""


def content(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def examined(*texts: str) -> Examination:
    return Examination(
        ranks=2,
        hosts=("gpu07.example.org", "gpu08"),
        began=0.0,
        seconds=1.0,
        versions={"torch": "2.13.0"},
        findings=(ok("torch", "2.13.0"), *(failure("x", text, f"see {text}") for text in texts)),
    )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory and an environment in which all secrets are."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[07-08]")
    monkeypatch.setenv("SHOAL_PROXY", f"http://me:{LOGIN}@proxy:3128")
    monkeypatch.setenv("EDITOR_OF_MINE", "none-of-your-business")
    folder = tmp_path / "run"
    for name in ("events", "logs", "jobs/1", "checkpoints/step-1"):
        (folder / name).mkdir(parents=True)
    config = {"rate": 0.1, "tracker": {"api_key": IN_LOGS[3]}, "url": f"s3://a:{LOGIN}@b"}
    lines = [
        {"event": "start", "t": 1.0, "rank": 0, "config": config, "note": SECRETS["SLURM_JWT_KEY"]},
        {"event": "steps", "t": 2.0, "loss": ["start"]},
        {"event": "start", "t": 3.0, "rank": 0, "config": {}},
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / "events/rank-0.jsonl").write_text(text + '{"event": "start", "t')
    everywhere = LOG + "\n".join(SECRETS.values())
    for name in ("logs/rank-0.log", "jobs/1/log.txt", "hang-1.txt"):
        (folder / name).write_text(everywhere)
    (folder / "data.bin").write_text("data-of-mine")
    (folder / "checkpoints/step-1/state.json").write_text("state-of-mine")
    (tmp_path / "elsewhere").write_text("private-of-mine")
    (folder / "logs/link.log").symlink_to(tmp_path / "elsewhere")
    return folder


@pytest.mark.parametrize("anonymous", [False, True])
def test_no_secret_is_in_it_and_all_that_helps_is(run: Path, anonymous: bool, tmp_path: Path) -> None:
    told = [*SECRETS.values(), f"https://me:{LOGIN}@h/x", "wide " * 30 + SECRETS["HF_TOKEN"]]
    found = collect_bundle(examined(*told), described=SECRETS["HF_TOKEN"], run=run, anonymous=anonymous)
    said = write_bundle(found, tmp_path / "b.zip")
    texts = content(tmp_path / "b.zip")
    whole = "\n".join([*texts, *texts.values()])
    for secret in (*SECRETS.values(), LOGIN, *IN_LOGS):
        for form in {secret, json.dumps(secret)[1:-1]}:
            assert form not in whole
    for private in ("none-of-your-business", "data-of-mine", "state-of-mine", "private-of-mine"):
        assert private not in whole
    assert [line.partition(" (")[0] for line in said] == list(texts)
    assert "NCCL_DEBUG=INFO" in texts["environment.txt"].splitlines()
    assert "SLURM_JWT_KEY=***" in texts["environment.txt"].splitlines()
    starts = [json.loads(line) for line in texts["run/starts.jsonl"].splitlines()]
    assert [one["t"] for one in starts] == [1.0, 3.0]
    assert starts[0]["config"]["rate"] == 0.1
    assert {"run/logs/rank-0.log", "run/jobs/1/log.txt", "run/hang-1.txt"} <= texts.keys()
    assert "step 1 loss 0.5 tokens: 4096" in texts["run/logs/rank-0.log"]
    assert "--steps 10" in texts["run/logs/rank-0.log"]
    assert json.loads(texts["report.json"])["versions"] == {"torch": "2.13.0"}
    assert texts["report.txt"].startswith("shoal doctor: ")


def test_hosts_user_and_home_are_replaced_the_same_everywhere(run: Path) -> None:
    home, user, here = str(Path.home()), getpass.getuser(), socket.gethostname()
    (run / "logs/rank-0.log").write_text(
        f"{user}@gpu08: {home}/x on gpu07 and gpu07.example.org, {here}\n"
    )
    finding = f"rank 1 (gpu08) in {home}/runs"
    texts = collect_bundle(examined(finding), described="", run=run, anonymous=True)
    assert texts["run/logs/rank-0.log"] == "USER@host-2: HOME/x on host-1 and host-1, host-3\n"
    assert "rank 1 (host-2) in HOME/runs" in texts["report.txt"]
    assert json.loads(texts["report.json"])["hosts"] == ["host-1", "host-2"]
    assert "SLURM_JOB_NODELIST=***" in texts["environment.txt"].splitlines()
    named = collect_bundle(examined(finding), described="", run=run, anonymous=False)
    assert f"gpu08) in {home}/runs" in named["report.txt"]


def test_only_whole_lines_of_the_end_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("secret-begins-" + "x" * support_bundle.TAIL + "\nlast\n")
    assert support_bundle._tail(path) == "last\n"
    path.write_text("".join(f"{number}\n" for number in range(1000)))
    assert support_bundle._tail(path).splitlines() == [
        str(number) for number in range(1000 - LINES, 1000)
    ]


def test_a_file_that_is_there_is_not_replaced_and_others_cannot_read_it(tmp_path: Path) -> None:
    path = tmp_path / "b.zip"
    write_bundle({"a": "1"}, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(LaunchError, match="File exists"):
        write_bundle({"a": "2"}, path)
    assert content(path) == {"a": "1"}


def test_half_an_archive_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(LaunchError, match="No space left"):
        write_bundle({"a": "1"}, tmp_path / "b.zip")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(100)
def test_no_line_is_too_long_to_be_looked_through() -> None:
    for piece in ("a", "-", "--a", "a=", "eyJ-", "://"):
        long = piece * (support_bundle.TAIL // len(piece))
        assert Redactor([], {"host": "host-1"}).text(long + " host") == long + " host-1", piece


def test_what_is_masked() -> None:
    for text, left in (
        ("a: token=abc def", "a: token=*** def"),
        ("tokens: 123, tokenizer=bpe", "tokens: 123, tokenizer=bpe"),
        ("'dbPassword': 'x y', n=1", "'dbPassword': ***, n=1"),
        ('"token": "a\\"b", "n": 1', '"token": ***, "n": 1'),
        ("keep the key here", "keep the key here"),
        ("a known-secret-value b", "a *** b"),
        ("train.py --api-key=abc --lr=1", "train.py --api-key=*** --lr=1"),
        ("['train.py', '--password', 'abc', 'x']", "['train.py', '--password', ***, 'x']"),
        ("DB_PASS=abc MYSQL_PWD=def PWD=/home", "DB_PASS=*** MYSQL_PWD=*** PWD=/home"),
        ("postgres://me:p@ss@host/db", "postgres://***@host/db"),
        ("Authorization: token abc\nx", "***\nx"),
        ("{'token': b'abc', key=SecretStr('def')}", "{'token': ***, key=***)}"),
        ('{"log": "{\\"password\\": \\"abc\\"}"}', '{"log": "{\\"password\\": ***}"}'),
        ("token => abc, x", "token => ***, x"),
        ("machine h login me password abc x", "*** x"),
        ("curl -u me:abc https://h", "curl *** https://h"),
        ("n01 n01x n01-ib xn01", "host-1 n01x n01-ib xn01"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nx", "***\nx"),
    ):
        names = stand_ins(hosts=["n01"], addresses=[], user="", home="/")
        assert Redactor(["known-secret-value", "key"], names).text(text) == left
