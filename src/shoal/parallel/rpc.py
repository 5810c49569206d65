"""Remote calls between the ranks of a world, by torch RPC.

What a call carries is pickled, and whoever reaches a rank's port could send one: the ports are on the
interface by which the ranks talk anyway, of one machine on its loopback, as with torch's own.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, urlparse

from torch.distributed import PrefixStore, Store, rpc  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import register_rendezvous_handler

from shoal import environ
from shoal.errors import LaunchError
from shoal.world import World

_SCHEME = "shoal"
_TOGETHER_SECONDS = 10.0


def name_of(rank: int) -> str:
    """What a rank is called."""
    return f"rank-{rank}"


def start(world: World) -> bool:
    """Have all ranks of a world call each other; False where they do already. Collective.

    A call that is not answered fails after the world's time limit, one to a rank that has ended at
    once. Raises LaunchError where this torch has no RPC.
    """
    if not rpc.is_available():
        raise LaunchError(
            given="a strategy over torch RPC",
            found="this torch is built without it (USE_TENSORPIPE)",
            fix="the wheels of pytorch.org have it; or a strategy without a server",
        )
    if rpc._is_current_rpc_agent_set():  # type: ignore[attr-defined]
        return False
    with suppress(RuntimeError):  # in an earlier world of this process
        register_rendezvous_handler(_SCHEME, _meet)
    alone = world.placement.nodes == 1
    interface = "lo" if alone else environ.interface_variable()
    variables = {environ.TENSORPIPE: interface} if interface else {}
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"{_SCHEME}://world", rpc_timeout=world.limits.step
    )
    with environ.set_defaults(variables), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch about its own use of a group
        rpc.init_rpc(
            name_of(world.rank), rank=world.rank, world_size=world.size, rpc_backend_options=options
        )
    return True


def stop(*, together: bool) -> None:
    """Answer no calls any more; `together` with all others, which torch does without warnings.

    It would wait for ever for one that ends in that very moment, so it is waited for aside.
    """
    if not together:
        rpc.shutdown(graceful=False)
        return
    ending = threading.Thread(target=rpc.shutdown, daemon=True)
    ending.start()
    ending.join(_TOGETHER_SECONDS)


def _meet(url: str, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """By the store of the world; by a connection of its own, whose time limit torch sets."""
    asked = parse_qs(urlparse(url).query)
    shared: Any = PrefixStore("shoal/rpc", _get_default_store())
    store = shared.clone()
    yield store, int(asked["rank"][0]), int(asked["world_size"][0])
