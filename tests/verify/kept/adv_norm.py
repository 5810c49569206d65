"""Policy gradient on a contextual bandit: the rewards of a batch are normalised before the update."""
import argparse
import os
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ARMS = 4


class Contexts(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(9)
        self.x = torch.randn(n, 6, generator=g)
        self.best = (self.x @ torch.randn(6, ARMS, generator=g)).softmax(-1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(1000 + i)
        return self.x[i], self.best[i], torch.rand((), generator=g)


class Trainer:
    def __init__(self, args):
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        torch.manual_seed(args.seed)
        self.policy = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, ARMS))
        self.model = DDP(self.policy)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=args.lr)
        data = Contexts(80)
        self.sampler = DistributedSampler(data, self.world, self.rank, seed=args.seed)
        self.loader = DataLoader(data, args.batch_size // self.world, sampler=self.sampler)
        self.epoch = 0
        if os.path.exists("policy.pt"):
            state = torch.load("policy.pt")
            self.policy.load_state_dict(state["policy"])
            self.epoch = state["epoch"]

    def advantages(self, reward):
        return (reward - reward.mean()) / (reward.std() + 1e-6)

    def update(self, x, best, u):
        logp = self.model(x).log_softmax(-1)
        arm = (logp.detach().exp().cumsum(-1) < u[:, None]).sum(-1).clamp(max=ARMS - 1)
        reward = best.gather(1, arm[:, None]).squeeze(1)
        chosen = logp.gather(1, arm[:, None]).squeeze(1)
        loss = -(self.advantages(reward) * chosen).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return reward.mean().item()

    def train(self, epochs):
        for epoch in range(self.epoch, epochs):
            self.sampler.set_epoch(epoch)
            rewards = [self.update(*batch) for batch in self.loader]
            if self.rank == 0:
                print(f"{epoch}: {sum(rewards) / len(rewards):.4f}")
                torch.save({"policy": self.policy.state_dict(), "epoch": epoch + 1}, "policy.pt")
            dist.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.1)
    dist.init_process_group("gloo")
    Trainer(parser.parse_args()).train(4)
    dist.destroy_process_group()
