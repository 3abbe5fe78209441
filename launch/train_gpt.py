"""Train a small GPT on bytes of the Python standard library's own source: real text, everywhere.

    torchrun --nproc-per-node 4 launch/train_gpt.py --wrap ddp

One code path for one process and many, CPU (gloo) and CUDA (nccl). Watching it is one line.
"""

import argparse
import contextlib
import math
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ddpprobe.testing


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):  # [batch, length, dim]
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [batch, head, length, ...]
        return self.proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, heads)
        layers = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        self.norm2, self.mlp = nn.LayerNorm(dim), nn.Sequential(*layers)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, layers, dim, heads, length):
        super().__init__()
        self.token, self.position = nn.Embedding(256, dim), nn.Embedding(length, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:  # what ends in the residual stream starts smaller, as in GPT-2
                residual = name.endswith(("proj.weight", "mlp.2.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, tokens, targets=None):  # both [batch, length]
        x = self.blocks(self.token(tokens) + self.position.weight[: tokens.shape[1]])
        logits = self.head(self.norm(x))  # [batch, length, 256]
        return logits if targets is None else (logits, F.cross_entropy(logits.mT, targets))


def corpus():
    """Return (train, held out) bytes: every tenth file of the standard library is held out."""
    files = []
    for folder, inner, names in os.walk(Path(os.__file__).parent):
        inner[:] = {*inner} - {"site-packages", "dist-packages", "test", "tests"}
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    texts = [p.read_bytes() for p in sorted(files, key=Path.as_posix)]
    parts = [t for i, t in enumerate(texts) if i % 10], texts[::10]
    return [torch.frombuffer(bytearray(b"".join(p)), dtype=torch.uint8) for p in parts]


def draw(data, args, device, *key):
    """Draw (tokens, targets), each [batch, length]: a pure function of the seed and the key."""
    generator = torch.Generator().manual_seed(hash((args.seed, *key)))  # the same in any process
    starts = torch.randint(len(data) - args.length, (args.batch, 1), generator=generator)
    rows = data[starts + torch.arange(args.length + 1)].long().to(device)
    return rows[:, :-1], rows[:, 1:]


def wrap(model, kind, device):
    if kind == "fsdp2":
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
    return DistributedDataParallel(model) if kind == "ddp" else model


def learning_rate(step, args):
    """Linear warm-up, then a cosine down to a tenth."""
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    cosine = 0.55 + 0.45 * math.cos(math.pi * progress)
    return args.lr * ((step + 1) / args.warmup if step < args.warmup else cosine)


def checkpoint(model, optimizer, directory, step=None):
    """Save as directory/step, or load the newest; alike for plain, DDP and FSDP2. Return step."""
    found = sorted(p.parent for p in Path(directory or "").glob("*/.metadata"))  # written last
    if not step and not found:
        raise SystemExit(f"--resume: found nothing in --checkpoint {directory}")
    path = Path(directory, f"{step:08d}") if step else found[-1]
    weights, moments = get_state_dict(model, optimizer)
    state, no_dist = {"model": weights, "optimizer": moments}, not dist.is_initialized()
    (dcp.save if step else dcp.load)(state, checkpoint_id=path, no_dist=no_dist)
    if not step:
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return int(path.name)


@torch.no_grad()
def evaluate(model, batches):
    model.eval()
    loss = torch.stack([model(*batch)[1] for batch in batches]).mean()
    model.train()
    return loss


def train(model, optimizer, args, device, rank, start):
    data, held_out = corpus()
    for step in range(start, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        for micro in range(args.accumulate):
            hold = micro < args.accumulate - 1  # gradients are reduced in the last micro-batch only
            if args.wrap == "fsdp2":
                model.set_requires_gradient_sync(not hold)
            with model.no_sync() if args.wrap == "ddp" and hold else contextlib.nullcontext():
                _, loss = model(*draw(data, args, device, step, micro, rank))
                (loss / args.accumulate).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        last, rest = step == args.steps - 1, (step + 1) % args.eval_every == 0
        if step % args.log_every == 0 or last:
            norm = norm.full_tensor() if args.wrap == "fsdp2" else norm  # every rank has a part
            if rank == 0:
                print(f"step {step:4d}  loss {loss:.4f}  grad norm {norm:.3f}", flush=True)
        if rest:
            loss = evaluate(model, [draw(held_out, args, device, i, rank) for i in range(4)])
            if rank == 0:
                print(f"step {step:4d}  held out {loss:.4f}", flush=True)
        if args.checkpoint and (rest or last):
            checkpoint(model, optimizer, args.checkpoint, step + 1)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wrap", choices=("none", "ddp", "fsdp2"), default="none")
    numbers = dict(steps=120, seed=0, layers=4, dim=128, heads=4, length=128, batch=8, accumulate=1)
    numbers |= dict(lr=1.5e-3, warmup=10, clip=1.0, log_every=10, eval_every=40, every=10)
    for name, value in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--checkpoint", help="directory, saved to after each eval and at the end")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    parser.add_argument("--inject", action="append", default=[], help="see ddpprobe.testing")
    parser.add_argument("--hash", action="store_true", help="print the sha256 of each rank's state")
    parser.add_argument("--run-dir", help="where ddpprobe records the run")
    parser.add_argument("--no-probe", action="store_true", help="train without ddpprobe")
    return parser.parse_args()


def main():
    args = parse()
    ranks = int(os.environ.get("WORLD_SIZE", "0"))  # 0: not under torchrun
    if (ranks > 1) if args.wrap == "none" else (ranks == 0):
        raise SystemExit("--wrap ddp and fsdp2 are for torchrun, --wrap none is for one process")
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if ranks:
        dist.init_process_group("nccl" if cuda else "gloo")
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(args.seed)
    model = wrap(GPT(args.layers, args.dim, args.heads, args.length).to(device), args.wrap, device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, (0.9, 0.95), weight_decay=0.1)
    start = checkpoint(model, optimizer, args.checkpoint) if args.resume else 0
    if not args.no_probe:
        ddpprobe.install(model, run_dir=args.run_dir, every=args.every, first_step=start)
    for spec in args.inject:
        ddpprobe.testing.inject(model, spec, first_step=start)
    train(model, optimizer, args, device, rank, start)
    if args.hash:
        print(f"rank {rank} sha256 {ddpprobe.testing.state_hash(model, optimizer)}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(0.5)  # gloo's threads must be gone before the interpreter is, or it may abort


if __name__ == "__main__":
    main()
