"""Reversing padded sequences with an encoder-decoder GRU, with Accelerate."""
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

PAD, BOS, VOCAB = 0, 1, 14


def collate(items):
    src = pad_sequence([torch.tensor(s) for s in items], batch_first=True, padding_value=PAD)
    tgt = pad_sequence([torch.tensor(s[::-1]) for s in items], batch_first=True, padding_value=-100)
    return {"src": src, "labels": tgt}


class Seq2Seq(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.encoder = nn.GRU(dim, dim, batch_first=True)
        self.decoder = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, VOCAB)

    def forward(self, src, labels):
        lengths = (src != PAD).sum(1)
        states, _ = self.encoder(self.emb(src))
        h = states[torch.arange(len(src)), lengths - 1].unsqueeze(0)
        inputs = labels.clamp(min=PAD).roll(1, 1)
        inputs[:, 0] = BOS
        out, _ = self.decoder(self.emb(inputs), h)
        return self.lm_head(out)


def make_sequences(n=96):
    g = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 10, (n,), generator=g).tolist()
    return [torch.randint(2, VOCAB, (k,), generator=g).tolist() for k in sizes]


def main():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True))
    set_seed(8)
    model = Seq2Seq()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(make_sequences(), batch_size=16, shuffle=True, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    start = 0
    if os.path.exists("seq2seq.pt"):
        ck = torch.load("seq2seq.pt")
        accelerator.unwrap_model(model).load_state_dict(ck["model"])
        start = ck["epoch"]
    for epoch in range(start, 3):
        loader.set_epoch(epoch)
        for batch in loader:
            logits = model(**batch)
            labels = batch["labels"]
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            torch.save({"model": accelerator.unwrap_model(model).state_dict(), "epoch": epoch + 1}, "seq2seq.pt")
        accelerator.wait_for_everyone()
        accelerator.print("epoch", epoch)
    accelerator.end_training()


if __name__ == "__main__":
    main()
