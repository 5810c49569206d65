from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal.tools.plan.machine.machines import find_machine, machine_catalogue
from shoal.tools.plan.work.transformer import MODELS, parse_model
from shoal.util.errors import ShoalError

FILE = """[mine]
half = 100
fp32 = 10.0
memory = 24
memory_bandwidth = 900
link = {link}
network = 3
devices = {devices}{more}
source = "measured"
[mine.efficiency]
product = {product}
"""


def test_the_catalogue() -> None:
    machines = machine_catalogue()
    assert machines["a100-80"].memory_bandwidth == 2039e9
    assert machines["h100-sxm"].half == 989.5e12
    assert (machines["a100-80"].per_host, machines["gb200"].per_host, machines["gb200"].devices) == (
        8,
        4,
        72,
    )
    assert all(each.source and each.network <= each.link for each in machines.values())


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE.format(link=32, devices=4, product=0.6, more=""))
    machine = find_machine(str(path))
    assert (machine.name, machine.link, machine.efficiency.product) == ("mine", 32e9, 0.6)


def test_all_mistakes_of_a_file_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        FILE.format(link=0, devices=2.5, product=3, more="\nthreads = 2").replace("fp32", "fp23")
    )
    with pytest.raises(ShoalError) as raised:
        find_machine(str(path))
    for mistake in (
        "fp23 is unknown",
        "fp32 is missing",
        "link is 0, not between 0.0001 and 100000",
        "devices is 2.5, not an integer",
        "efficiency.product is 3, not between",
        "threads needs cores",
    ):
        assert mistake in raised.value.found


def test_rates_that_no_machine_has(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    for value in ("1" + 400 * "0", "1e-320", "inf", "nan"):
        path.write_text(FILE.format(link=value, devices=4, product=0.6, more=""))
        with pytest.raises(ShoalError, match=r"link is .*, not between"):
            find_machine(str(path))
    text = FILE.format(link=1, devices=4, product=0.6, more="")
    path.write_text(text.replace("memory = 24", "memory = 1.2"))
    with pytest.raises(ShoalError, match=r"memory is 1.2 GB"):
        find_machine(str(path))


def test_values_in_other_units(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = FILE.format(link=1, devices=4, product=0.6, more="\nhost = 3")
    path.write_text(text)
    with pytest.raises(ShoalError, match="host 3 does not divide devices 4"):
        find_machine(str(path))
    path.write_text(text.replace("memory = 24", "memory = 24576"))
    with pytest.raises(ShoalError, match="memory is 24576, not between"):
        find_machine(str(path))
    path.write_text(re.sub("memory_bandwidth = .*", "memory_bandwidth = 1", text))
    with pytest.raises(ShoalError, match="one of them is in another unit"):
        find_machine(str(path))


def test_files_that_are_no_machine(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    for text in ("", "[a]\n[b]\n", "a = 1\n", "not toml", "[a]\nefficiency = 1\n"):
        path.write_text(text)
        with pytest.raises(ShoalError):
            find_machine(str(path))


def test_unknown_machines_give_the_nearest_names() -> None:
    with pytest.raises(ShoalError) as raised:
        find_machine("a100-90")
    assert "a100-80" in raised.value.fix
    with pytest.raises(ShoalError, match="can't be read"):
        find_machine("absent.toml")


def test_parameters_of_published_models() -> None:
    published = {"gpt2-xl": 1.56, "gpt3-175b": 174.6, "llama-7b": 6.74, "llama-8b": 8.03}
    published |= {"llama-70b": 69.0, "mixtral-8x7b": 46.7}
    found = {name: MODELS[name].parameters / 1e9 for name in published}
    assert found == pytest.approx(published, rel=0.005)


def test_models_that_can_not_be() -> None:
    for text, found in (
        ("llama-71b", "neither a model"),
        ("hidden=64,layers=2", "heads, vocab, seq missing"),
        ("llama-7b,layers=0", "layers is 0"),
        ("llama-7b,heads=33", "does not divide"),
        ("llama-7b,seq=-1", "neither a model"),
        ("llama-7b,seq=9999999999", "not between 1 and"),
        ("llama-7b,gated=2", "gated is 2"),
        ("llama-7b,experts=8", "0 choices among 8 experts"),
        ("llama-7b,seq=8,seq=9", "neither a model"),
    ):
        with pytest.raises(ShoalError, match=found):
            parse_model(text)
