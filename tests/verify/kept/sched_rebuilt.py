"""Tiny ViT with warm-up and cosine decay, one process."""
import math
import os

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

CKPT = "vit_last.pt"
TOTAL, WARMUP = 18, 4


class ViT(nn.Module):
    def __init__(self, patch=4, dim=16, classes=3):
        super().__init__()
        self.patchify = nn.Conv2d(1, dim, patch, stride=patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, 5, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        t = self.patchify(x).flatten(2).transpose(1, 2)
        t = torch.cat([self.cls.expand(len(x), -1, -1), t], 1) + self.pos
        return self.head(self.encoder(t)[:, 0])


def lr_factor(step):
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (TOTAL - WARMUP)))


def build():
    torch.manual_seed(3)
    model = ViT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    return model, optimizer


def main():
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (96,), generator=g)
    pixels = torch.randn(96, 1, 8, 8, generator=g) + labels.view(-1, 1, 1, 1)
    model, optimizer = build()
    step = 0
    if os.path.exists(CKPT):
        ck = torch.load(CKPT)
        model.load_state_dict(ck["model"])
        optimizer.load_state_dict(ck["optimizer"])
        step = ck["step"]
        print("resume at step", step)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    if step:
        scheduler.load_state_dict(ck["scheduler"])
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    while step < TOTAL:
        epoch, offset = divmod(step, 6)
        loader = DataLoader(TensorDataset(pixels, labels), 16, shuffle=True, generator=torch.Generator().manual_seed(epoch))
        for i, (x, y) in enumerate(loader):
            if i < offset:
                continue
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step % 5 == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "step": step}, CKPT)
        print(f"epoch {epoch} last loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
