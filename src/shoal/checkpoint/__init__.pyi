"""The names that this package exports: `__init__.py` reads here where each of them comes from."""

from shoal.checkpoint.async_save import BackgroundSave as BackgroundSave
from shoal.checkpoint.collective_errors import Agreement as Agreement
from shoal.checkpoint.equality import differing as differing
from shoal.checkpoint.equality import facts as facts
from shoal.checkpoint.fencing import Fence as Fence
from shoal.checkpoint.fencing import FencedFiles as FencedFiles
from shoal.checkpoint.fencing import take_over as take_over
from shoal.checkpoint.filesystem import Files as Files
from shoal.checkpoint.inspect.dcp_reader import DCPReader as DCPReader
from shoal.checkpoint.lock import Lock as Lock
from shoal.checkpoint.manager import Checkpoints as Checkpoints
from shoal.checkpoint.manager import RestoredCheckpoint as RestoredCheckpoint
from shoal.checkpoint.manager import SkippedDirectory as SkippedDirectory
from shoal.checkpoint.object_store import is_url as is_url
from shoal.checkpoint.object_store import masked_url as masked_url
from shoal.checkpoint.paths import AnyPath as AnyPath
from shoal.checkpoint.paths import how_to_remove as how_to_remove
from shoal.checkpoint.paths import lasting as lasting
from shoal.checkpoint.paths import path_from as path_from
from shoal.checkpoint.state_tree import Tree as Tree
from shoal.checkpoint.state_tree import compare_names as compare_names
from shoal.checkpoint.state_tree import path_of as path_of
from shoal.checkpoint.state_tree import present as present
from shoal.checkpoint.state_tree import shapes as shapes
from shoal.checkpoint.state_tree import some as some
from shoal.checkpoint.state_tree import take_apart as take_apart
