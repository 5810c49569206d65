"""Small causal language model; reports the validation perplexity of each epoch."""
import math
import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

VOCAB = 17


def corpus(n, seed):
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(0, VOCAB, (n, 1), generator=g)
    stride = torch.randint(1, 4, (n, 1), generator=g)
    return TensorDataset((start + stride * torch.arange(8)) % VOCAB)


class LM(nn.Module):
    def __init__(self, dim=20):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


def nll(logits, tokens):
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), tokens[:, 1:].reshape(-1), reduction="none")


@torch.no_grad()
def perplexity(net, loader):
    net.eval()
    total = count = 0.0
    for (tokens,) in loader:
        each = nll(net(tokens), tokens)
        total += each.sum().item()
        count += each.numel()
    ppl = torch.tensor(math.exp(total / count))
    dist.all_reduce(ppl)
    net.train()
    return (ppl / dist.get_world_size()).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, valid = corpus(64, 1), corpus(22, 2)
    sampler = DistributedSampler(train, world, rank)
    loader = DataLoader(train, 16 // world, sampler=sampler)
    valid_loader = DataLoader(Subset(valid, range(rank, len(valid), world)), 4)
    torch.manual_seed(0)
    net = LM()
    model = DDP(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-4)
    first = 0
    if os.path.exists("lm.pt"):
        state = torch.load("lm.pt")
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
    for epoch in range(first, 4):
        sampler.set_epoch(epoch)
        for (tokens,) in loader:
            optimizer.zero_grad()
            nll(model(tokens), tokens).mean().backward()
            optimizer.step()
        ppl = perplexity(net, valid_loader)
        if rank == 0:
            print(f"epoch {epoch}: perplexity {ppl:.4f}")
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, "lm.pt")
        dist.barrier()
    dist.destroy_process_group()


main()
