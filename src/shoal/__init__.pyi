"""The public names of Shoal, one a line: `__init__.py` reads here where each of them comes from."""

from shoal.data import Loader as Loader
from shoal.data import Permutation as Permutation
from shoal.data import ShardedDataset as ShardedDataset
from shoal.data import TokenBudget as TokenBudget
from shoal.data import WeightedSampling as WeightedSampling
from shoal.data.batch import Batch as Batch
from shoal.data.coupling.layers import Coupled as Coupled
from shoal.data.coupling.layers import SampleGroups as SampleGroups
from shoal.data.gather import GatheredRows as GatheredRows
from shoal.data.gather import gather as gather
from shoal.data.local_batches import LocalBatches as LocalBatches
from shoal.data.noise import Noise as Noise
from shoal.data.step_result import StepResult as StepResult
from shoal.distributed.added_launcher import add_launcher as add_launcher
from shoal.distributed.cluster_env import Placement as Placement
from shoal.distributed.init import init as init
from shoal.distributed.layout import Layout as Layout
from shoal.distributed.world import World as World
from shoal.launcher import launch as launch
from shoal.strategies import parallelize as parallelize
from shoal.strategies.activation_checkpoint import ActivationCheckpointing as ActivationCheckpointing
from shoal.strategies.asynchronous.hogwild import Hogwild as Hogwild
from shoal.strategies.context_parallel.options import ContextParallel as ContextParallel
from shoal.strategies.data_parallel.compression import PowerSGD as PowerSGD
from shoal.strategies.data_parallel.compression import TopK as TopK
from shoal.strategies.data_parallel.ddp import DDP as DDP
from shoal.strategies.data_parallel.ddp import DataParallel as DataParallel
from shoal.strategies.data_parallel.ddp import SingleProcess as SingleProcess
from shoal.strategies.data_parallel.local_sgd import DiLoCo as DiLoCo
from shoal.strategies.data_parallel.local_sgd import LocalSGD as LocalSGD
from shoal.strategies.device_placement.options import DevicePlacement as DevicePlacement
from shoal.strategies.expert_parallel.options import ExpertParallel as ExpertParallel
from shoal.strategies.fsdp.options import FSDP as FSDP
from shoal.strategies.pipeline.options import Pipeline as Pipeline
from shoal.strategies.random_draws.layouts import samples as samples
from shoal.strategies.rpc_pipeline.options import RPCPipeline as RPCPipeline
from shoal.strategies.task import Task as Task
from shoal.strategies.tensor_parallel.options import TensorParallel as TensorParallel
from shoal.telemetry.trackers.comet import Comet as Comet
from shoal.telemetry.trackers.mlflow import MLflow as MLflow
from shoal.telemetry.trackers.tensorboard import TensorBoard as TensorBoard
from shoal.telemetry.trackers.trackio import Trackio as Trackio
from shoal.telemetry.trackers.wandb import WandB as WandB
from shoal.tools.report.coverage import coverage as coverage
from shoal.training.bad_steps import BadSteps as BadSteps
from shoal.training.early_stopping import Validation as Validation
from shoal.training.ema import EMA as EMA
from shoal.training.evaluation import Accuracy as Accuracy
from shoal.training.evaluation import evaluate as evaluate
from shoal.training.guards.options import Guards as Guards
from shoal.training.loop import TrainingStatus as TrainingStatus
from shoal.training.loop import TrainResult as TrainResult
from shoal.training.loop import train as train
from shoal.training.model_export import export as export
from shoal.training.model_load import load as load
from shoal.training.run import Run as Run
from shoal.training.save_policy import YoungDaly as YoungDaly
from shoal.training.saved_plan import SavedPlan as SavedPlan
from shoal.training.saved_plan import load_plan as load_plan
from shoal.training.schedule import LRSchedule as LRSchedule
from shoal.training.step import Step as Step
from shoal.util.decision import Decision as Decision
from shoal.util.errors import AgreementError as AgreementError
from shoal.util.errors import CheckpointError as CheckpointError
from shoal.util.errors import CorruptionError as CorruptionError
from shoal.util.errors import DataError as DataError
from shoal.util.errors import LaunchError as LaunchError
from shoal.util.errors import LayoutError as LayoutError
from shoal.util.errors import ShoalError as ShoalError
from shoal.util.errors import StepError as StepError

__version__: str
__all__: list[str]

def __dir__() -> list[str]: ...
