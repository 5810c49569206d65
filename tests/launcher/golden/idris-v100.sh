#!/bin/bash
#SBATCH --job-name=torch-multi-gpu
#SBATCH --nodes=N # total number of nodes (N to be defined)
#SBATCH --ntasks-per-node=4 # number of tasks per node (here 4 tasks, or 1 task per GPU)
#SBATCH --gres=gpu:4 # number of GPUs reserved per node (here 4, or all the GPUs)
#SBATCH --cpus-per-task=10 # number of cores per task (4x10 = 40 cores, or all the cores)
#SBATCH --hint=nomultithread
#SBATCH --time=40:00:00
#SBATCH --output=torch-multi-gpu%j.out
##SBATCH --account=abc@v100
module load pytorch-gpu/py3/1.11.0
srun python myscript.py
