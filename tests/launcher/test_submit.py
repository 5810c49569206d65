"""What becomes of a request: decided, checked and said, by values alone."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_slurm import place, request, write
from shoal.telemetry.stop_time import stopping_seconds
from shoal.tools.submit import site_catalog
from shoal.tools.submit.check import (
    check_job,
    notes,
    objections,
    secret_options,
    without_secrets,
    workers_of,
)
from shoal.tools.submit.decide import decide
from shoal.tools.submit.scheduler import Job, JobRequest
from shoal.tools.submit.site_catalog import Partition, Qos, Site, read_site
from shoal.tools.submit.slurm.site_draft import draft_text
from shoal.tools.submit.times import gpu_hours, parse_time, spell_time
from shoal.util.errors import LaunchError

HOUR = 3600
JEAN_ZAY = site_catalog.load(site_catalog.find_entry("jean-zay"))
PLAIN = site_catalog.load(site_catalog.find_entry("plain"))


def job(**changes: object) -> JobRequest:
    return request(**{"time": 20 * HOUR, **changes})


def against(site: Site = JEAN_ZAY, save: float | None = None, **changes: object) -> list[str]:
    """What is found to speak against a request."""
    asked = job(**changes)
    return [each.found for each in objections(asked, site, decide(asked, site, save=save))]


def test_times_are_read_as_slurm_does() -> None:
    for text, seconds in (
        ("90", 5400),
        ("1:30", 90),
        ("20:00:00", 72000),
        ("2-12", 216000),
        ("1-02:03", 93780),
        ("1-02:03:04", 93784),
    ):
        assert parse_time(text) == seconds
        assert parse_time(spell_time(seconds)) == seconds
    for text in ("", "0", "1h", "1:2:3:4", "-5", "1-", "$(x)", "1:00\n"):
        with pytest.raises(LaunchError, match="it is not a duration"):
            parse_time(text)
    assert gpu_hours(4, 20 * HOUR) == "80 GPU-hours"
    assert gpu_hours(1, 900) == "0.25 GPU-hours"
    assert gpu_hours(1000, 100 * HOUR) == "100,000 GPU-hours"


def test_what_speaks_against_a_job() -> None:
    rows: tuple[tuple[dict[str, Any], str], ...] = (
        ({"partition": "gpu"}, "jean-zay has gpu_p13, gpu_p2, gpu_p5"),
        ({"gpus": 8}, "a node of gpu_p13 has 4 GPUs"),
        ({"time": 101 * HOUR, "gpus": 4}, "gpu_p13 ends jobs after 100:00:00: 404 GPU-hours"),
        ({"time": 21 * HOUR, "gpus": 8, "partition": "gpu_p5"}, "gpu_p5 ends jobs after 20:00:00"),
        ({"time": 30 * HOUR, "nodes": 5, "gpus": 4}, "ends jobs after 20:00:00: 600 GPU-hours"),
        ({"qos": "qos_gpu-dev", "gpus": 1}, "gpu_p13 qos_gpu-dev ends jobs after 02:00:00"),
        ({"time": HOUR, "nodes": 129, "gpus": 4}, "gives a job of this length at most 512 GPUs"),
        ({"gpus": 4, "processes": 1}, "4 GPUs reserved, 1 used: 60 GPU-hours of 80 GPU-hours"),
        ({"gpus": 2, "processes": 4}, "4 processes share 2 GPUs"),
        ({"nodes": 2, "processes": 1}, "1 node(s) without a process"),
        ({"gpus": 4, "cpus": 11}, "44 cores, and a node of gpu_p13 has 40"),
        ({"gpus": 8, "partition": "gpu_p2", "workers": 8}, "a process has 3 core(s)"),
        ({"memory": "10G"}, "does not accept --mem"),
        ({"nodes": 2, "processes": 3, "launcher": "torchrun"}, "can't be split equally over 2 nodes"),
        ({"sweep": (("a",),), "launcher": "torchrun"}, "each element has its own"),
        ({"time": 600, "save": 200.0}, "460 s of it are kept for saving"),
    )
    for changes, found in rows:
        said = against(**changes)
        assert any(found in each for each in said), (changes, said)


def test_nothing_speaks_against_these() -> None:
    rows: tuple[dict[str, Any], ...] = (
        {"gpus": 4},
        {"nodes": 128, "gpus": 4},
        {"nodes": 4, "gpus": 4, "time": 100 * HOUR},
        {"gpus": 8, "partition": "gpu_p2", "workers": 3},
        {"nodes": 4, "gpus": 3, "partition": "gpu_p5"},
        {"qos": "qos_gpu-dev", "gpus": 1, "time": 2 * HOUR},
        {"nodes": 3, "processes": 5},
        {"time": 60},
    )
    for changes in rows:
        assert against(**changes) == [], changes
    # A site of which nothing is known objects to waste alone.
    assert against(PLAIN, partition="any", gpus=99, time=9999 * HOUR) == []
    assert len(against(PLAIN, gpus=4, processes=1)) == 1


def test_qos_account_and_the_time_to_save_are_decided() -> None:
    def decided(site: Site = JEAN_ZAY, save: float | None = None, **changes: object) -> Job:
        return decide(job(**changes), site, save=save)

    # The QOS is the first that fits.
    assert decided(gpus=4).qos is None  # Slurm takes t3 by itself
    assert decided(gpus=4, time=21 * HOUR).qos == "qos_gpu-t4"
    assert decided(gpus=4, time=HOUR, qos="qos_gpu-dev").qos == "qos_gpu-dev"
    # Accounts get the suffix of the partition.
    assert decided().account is None
    assert decided(account="abc").account == "abc@v100"
    assert decided(account="abc", partition="gpu_p5").account == "abc@a100"
    assert decided(account="abc@cpu").account == "abc@cpu"
    # How long before its end a job is told.
    assert decided(PLAIN).lead == 300
    assert decided(PLAIN, time=120).lead == 30
    assert decided(PLAIN, 12.0).lead == 85
    assert decided(PLAIN, 400.0).lead == 860


def test_the_save_is_measured_from_what_rank_0_recorded(tmp_path: Path) -> None:
    assert stopping_seconds(tmp_path) is None
    step = {"event": "step", "wait": 0.5, "forward": 1.0, "backward": 2.0, "update": 0.5}
    saves = [{"event": "save", "seconds": seconds} for seconds in (90.0, 7.0, 8.0, 6.0, 5.0, 9.0)]
    odd = [{"event": "save", "seconds": bad} for bad in ("1", None, True, -1, 1e308, float("inf"))]
    lines = [json.dumps(event) for event in (step, *saves, *odd)]
    (tmp_path / "events").mkdir()
    record = tmp_path / "events/rank-0.jsonl"
    record.write_text("\n".join([*lines, '{"event": "st']))
    # The longest of the last five, and a step.
    assert stopping_seconds(tmp_path) == 13.0
    record.write_text(json.dumps(step) + "\n")
    assert stopping_seconds(tmp_path) is None


def test_what_is_said_of_a_job() -> None:
    def said(**changes: object) -> list[str]:
        asked = job(**changes)
        return list(notes(asked, JEAN_ZAY, decide(asked, JEAN_ZAY, save=None)))

    assert any("is untested" in note for note in said())
    plain = Site(name="plain", tried="here", requeue=False)
    *_, chain = notes(job(), plain, decide(job(), plain, save=None))
    assert "--chain N" in chain
    counted = "counts as 8 GPUs on each node, not 3: up to 640 GPU-hours"
    assert counted in said(nodes=4, gpus=3, partition="gpu_p5")
    assert "counts as 2 GPUs on each node, not 1: up to 40 GPU-hours" in said(gpus=1, cpus=11)
    assert any("--api-key" in note for note in said(args=("--api-key", "hunter2")))
    assert not any("hunter2" in note for note in said(args=("--api-key", "hunter2")))


def test_workers_are_read_from_the_text_and_the_options() -> None:
    assert workers_of("Loader(d, num_workers=4)\nx(num_workers=n)\n", ["--workers", "6"]) == 6
    assert workers_of("Loader(d, num_workers=4)", ["--num-workers=2"]) == 4
    assert workers_of("not python (", ["--num_workers=many", "--workers"]) == 0


def test_values_of_secrets_are_masked() -> None:
    words = ["--token", "abc", "--lr", "0.1", "--password=x", "--flag", "https://me:pw@host/x"]
    assert secret_options(words) == ["--token", "--password"]
    masked = ["--token", "***", "--lr", "0.1", "--password=***", "--flag", "https://***@host/x"]
    assert without_secrets(words) == masked


def test_what_is_wrong_in_a_site_is_named() -> None:
    for text, found in (
        ("about = ", "it is not TOML"),
        ("colour = 'red'", "an unknown key, colour"),
        ("scheduler = 'kubernetes'\nmpirun = ['mpiexec']", "mpirun, which is not a key of Kubernetes"),
        ("scheduler = 'ray'\nsetup = ['module purge']", "setup, which is not a key of Ray"),
        ("volumes = ['data:/mnt/data']", "volumes, which is not a key of Slurm"),
        (
            "scheduler = 'kubernetes'\n[partitions.a]\nparallel_environment = 'mpi'",
            "partitions.a.parallel_environment, which is not a key of Kubernetes",
        ),
        ("scheduler = 'pbs'\n[partitions.a.qos.b]\ngpus = 4", "partitions.a.qos, which is not a key"),
        ("requeue = 'no'", "requeue = 'no', a str"),
        ("lead = 5", "lead = 5, a int"),
        ("lead = 'soon'", "it is not a duration"),
        ("setup = 'module purge'", "setup = 'module purge', a str"),
        ("setup = [1]", "setup = 1, a int"),
        ("launcher = 'aprun'", "launcher = 'aprun'"),
        ("scheduler = 'cron'", "scheduler = 'cron'; Shoal supports slurm"),
        ("ports = '1; rm'", "ports = '1; rm'"),
        ("default = 'gpu'", "not one of its partitions"),
        ("partitions = 3", "partitions that are not tables"),
        ("[partitions.a]\nname = 'b'", "an unknown key, partitions.a.name"),
        ("[partitions.a]\ngpus = true", "partitions.a.gpus = True, a bool"),
        ("[partitions.a]\ngpus = -1", "partitions.a.gpus = -1"),
        ("[partitions.a]\noption = 5", "partitions.a.option = 5, a int"),
        ("mpirun = []", "mpirun = []"),
        ("ports = '20000-10001'", "ports = '20000-10001'"),
        ("[partitions.a.qos.b]\ntime = '1-'", "it is not a duration"),
        ("[partitions.a]\nqos = ['b']", "partitions.a.qos that are not tables"),
    ):
        with pytest.raises(LaunchError) as caught:
            read_site("mine", text, "mine.toml")
        assert found in caught.value.found or found in caught.value.given
        assert "mine.toml" in caught.value.given


def test_own_sites_come_before_those_that_are_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "shoal/sites"
    folder.mkdir(parents=True)
    (folder / "plain.toml").write_text("about = 'mine'\n")
    (folder / "other.toml").write_text("hosts = ['login[0-9]*']\n")
    assert site_catalog.load(site_catalog.entries()["plain"]).about == "mine"
    assert site_catalog.choose(None, "login3.x").value.name == "other"
    assert site_catalog.choose(None, "jean-zay4").value.name == "jean-zay"
    assert site_catalog.choose(None, "elsewhere").value.name == "plain"
    assert site_catalog.choose("jean-zay", "login3.x").value.name == "jean-zay"
    monkeypatch.setenv("SHOAL_SITE", "other")
    assert site_catalog.choose(None, "elsewhere").value.name == "other"
    with pytest.raises(LaunchError, match="jean-zay, plain, other"):
        site_catalog.choose("nowhere")


def test_the_pages_show_a_site_and_a_refusal_as_they_are(repository: Path) -> None:
    page = (repository / "docs/clusters/slurm.md").read_text()
    reference = (repository / "docs/clusters/slurm-reference.md").read_text()
    [text] = re.findall(r"^```toml\n(.*?)^```", reference, re.DOTALL | re.MULTILINE)
    site = read_site("mine", text, "mine.toml")
    named = set(re.findall(r"^(\w+) = ", text, re.MULTILINE))
    known = {field.name for kind in (Site, Partition, Qos) for field in fields(kind)}
    others = {"name", "partitions", "qos", "tried", "mpirun", "container", "options"}
    assert known - named == others | {"parallel_environment", "image", "volumes"}
    asked = job(gpus=4, processes=1)
    with pytest.raises(LaunchError) as caught:
        check_job(asked, PLAIN, decide(asked, PLAIN, save=None))
    assert str(caught.value).strip() in page
    long = job(gpus=4, nodes=2, time=25 * HOUR)
    decided = decide(long, site, save=None)
    assert (decided.qos, list(objections(long, site, decided))) == ("long", [])


SINFO = """\
main|infinite|8|gpu:8|4|1:8:1
gpu|1-00:00:00|128|gpu:a100:4(S:0-1)|6|2:32:2
gpu|1-00:00:00|64|(null)|2|2:16:2
short|30:00|64+|(null)|10+|2:16:2
short|30:00|64+|(null)|10|2:16:2
"""


def test_a_site_is_drafted_from_what_slurm_says() -> None:
    text = draft_text(
        "mine", SINFO, "ClusterName             = mini\nKillWait     = 5 sec\nJobRequeue = 0\n"
    )
    site = read_site("mine", text, "mine.toml")
    assert (site.about, site.requeue, site.multithread) == ("mini", False, False)
    assert list(site.partitions) == ["main", "gpu", "short"]
    gpu, main, short = (site.partitions[name] for name in ("gpu", "main", "short"))
    assert (gpu.gpus, gpu.cores, gpu.cpus_per_gpu, gpu.nodes) == (4, 64, 16, 8)
    assert (gpu.time, main.time, short.time) == (24 * HOUR, None, 1800)
    assert (main.gpus, main.cpus_per_gpu, short.gpus) == (8, 1, 0)
    assert "Nodes differ" in text
    assert "--partition=gpu" in write(job(partition="gpu"), site, place("/x"))
    with pytest.raises(LaunchError, match="no partition"):
        draft_text("mine", "slurm_load_partitions: error\n", "")


GOLDEN: dict[str, dict[str, object]] = {
    "gpu_p13": {"nodes": 4, "gpus": 4},
    "gpu_p2": {"nodes": 2, "gpus": 8, "partition": "gpu_p2", "time": 100 * HOUR},
    "gpu_p5": {"nodes": 4, "gpus": 3, "partition": "gpu_p5"},
}


def test_each_line_for_jean_zay_has_a_source(repository: Path) -> None:
    """What IDRIS's pages ask for: the file has each line of the script and, behind it, its source."""

    def differs(line: str) -> bool:
        return line.startswith(("#SBATCH", "module ", "srun ")) or "rank %s of" in line

    texts = {
        name: (repository / f"tests/launcher/golden/jean-zay-{name}.txt").read_text() for name in GOLDEN
    }
    head, _, whole = texts["gpu_p13"].partition("\n\n")
    sources = {line.split()[0].strip("[]") for line in head.splitlines()}
    for name, text in texts.items():
        body = whole if name == "gpu_p13" else text.partition("\n")[2]
        pairs = [line.rpartition(" | ") if line else ("", "", "") for line in body.splitlines()]
        assert {word for line, _, words in pairs if line for word in words.split(", ")} <= sources
        asked = job(account="abc", **GOLDEN[name])
        script = write(asked, JEAN_ZAY, place("/scratch/me", python="python")).splitlines()
        known = [line.rstrip() for line, _, _ in pairs]
        if name == "gpu_p13":
            assert known == script
            common = [line for line in script if not differs(line)]
        else:
            assert known == [line for line in script if differs(line)]
            assert common == [line for line in script if not differs(line)]
