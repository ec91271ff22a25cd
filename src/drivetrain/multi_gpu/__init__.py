"""Several GPUs with explicit control: the interface of common multi-GPU training scripts, over drivetrain's own parts.

`drivetrain.train` needs none of it. It is for scripts that are written against these names
(docs/guide/multi-gpu-trainer.md).
"""

from drivetrain.multi_gpu.config import MultiGPUConfig
from drivetrain.multi_gpu.environment import get_free_port, launch_distributed_training, setup_distributed_environment
from drivetrain.multi_gpu.gpu_monitor import GPUMonitor
from drivetrain.multi_gpu.managers import DataParallelManager, DistributedManager
from drivetrain.multi_gpu.optimizer import OptimizedTrainingOptimizer, create_optimized_training_optimizer
from drivetrain.multi_gpu.trainer import MultiGPUTrainer, create_multi_gpu_trainer, optimize_model_for_multi_gpu

__all__ = [
    "DataParallelManager",
    "DistributedManager",
    "GPUMonitor",
    "MultiGPUConfig",
    "MultiGPUTrainer",
    "OptimizedTrainingOptimizer",
    "create_multi_gpu_trainer",
    "create_optimized_training_optimizer",
    "get_free_port",
    "launch_distributed_training",
    "optimize_model_for_multi_gpu",
    "setup_distributed_environment",
]
