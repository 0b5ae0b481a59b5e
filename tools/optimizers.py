"""Makes the golden numbers of crates/nn/tests/optimizers.rs: five steps of each rule in float64.

Run with a Python that has PyTorch: python tools/optimizers.py > crates/nn/tests/optimizers.json
The loss is sum(a * (w - b)^4 / 4 + sin(w)) over 7 weights; the first 4 are a matrix, the last 3 a bias that does not
decay. LARS is not in torch.optim: its formula is written out here.
"""

import json

import torch

A = torch.tensor([0.5, 1.0, 2.0, 0.1, 3.0, 0.7, 1.5], dtype=torch.float64)
B = torch.tensor([1.0, -1.0, 0.3, 2.0, 0.0, -0.6, 0.2], dtype=torch.float64)
START = [0.3, -0.8, 1.1, 0.05, -0.4, 0.9, 0.6]
DECAYED = 4
RATES = [0.1, 0.1, 0.05, 0.05, 0.01]


def gradient(w):
    return A * (w - B) ** 3 + torch.cos(w)


def with_torch(make):
    matrix = torch.tensor(START[:DECAYED], dtype=torch.float64)
    bias = torch.tensor(START[DECAYED:], dtype=torch.float64)
    optimizer = make(matrix, bias)
    trace = []
    for rate in RATES:
        for group in optimizer.param_groups:
            group["lr"] = rate
        g = gradient(torch.cat([matrix, bias]))
        matrix.grad, bias.grad = g[:DECAYED].clone(), g[DECAYED:].clone()
        optimizer.step()
        trace.append(torch.cat([matrix, bias]).tolist())
    return trace


def groups(decay, matrix, bias):
    return [{"params": [matrix], "weight_decay": decay}, {"params": [bias], "weight_decay": 0.0}]


def lars(c, momentum, decay, rescale=True):
    w = torch.tensor(START, dtype=torch.float64)
    v = torch.zeros_like(w)
    trace = []
    for rate in RATES:
        g = gradient(w)
        m, n = w[:DECAYED], g[:DECAYED]
        local = c * m.norm() / (n.norm() + decay * m.norm())
        scaled = torch.cat([local * (n + decay * m), g[DECAYED:]])
        if rescale:
            v = momentum * v + scaled
            w = w - rate * v
        else:
            v = momentum * v + rate * scaled
            w = w - v
        trace.append(w.tolist())
    return trace


def steps_inside(momentum, decay, nesterov):
    """The form with the rate inside the buffer, without rescaling."""
    w = torch.tensor(START, dtype=torch.float64)
    v = torch.zeros_like(w)
    decays = torch.tensor([decay] * DECAYED + [0.0] * (7 - DECAYED), dtype=torch.float64)
    trace = []
    for rate in RATES:
        g = rate * (gradient(w) + decays * w)
        v = momentum * v + g
        w = w - (g + momentum * v if nesterov else v)
        trace.append(w.tolist())
    return trace


optim = torch.optim
cases = {
    "sgd": ({"weight-decay": 0.01}, with_torch(lambda m, b: optim.SGD(groups(0.01, m, b)))),
    "momentum": (
        {"weight-decay": 0.01},
        with_torch(lambda m, b: optim.SGD(groups(0.01, m, b), momentum=0.9)),
    ),
    "nesterov": (
        {"weight-decay": 0.01},
        with_torch(lambda m, b: optim.SGD(groups(0.01, m, b), lr=0.1, momentum=0.9, nesterov=True)),
    ),
    "adagrad": ({"weight-decay": 0.01}, with_torch(lambda m, b: optim.Adagrad(groups(0.01, m, b)))),
    "adam": ({"weight-decay": 0.01}, with_torch(lambda m, b: optim.Adam(groups(0.01, m, b)))),
    "adam ": ({}, with_torch(lambda m, b: optim.Adam([m, b]))),
    "adamw": ({}, with_torch(lambda m, b: optim.AdamW(groups(0.01, m, b)))),
    "lars": ({"weight-decay": 0.05, "lars-coefficient": 0.02}, lars(0.02, 0.9, 0.05)),
    "lars ": (
        {"weight-decay": 0.05, "lars-coefficient": 0.02, "rescale-momentum": False},
        lars(0.02, 0.9, 0.05, rescale=False),
    ),
    "momentum ": (
        {"weight-decay": 0.01, "rescale-momentum": False},
        steps_inside(0.9, 0.01, False),
    ),
    "nesterov ": (
        {"weight-decay": 0.01, "rescale-momentum": False},
        steps_inside(0.9, 0.01, True),
    ),
}
rows = [
    {"optimizer": name.strip(), "hyper": hyper, "weights": trace} for name, (hyper, trace) in cases.items()
]
print("[")
print(",\n".join(" " + json.dumps(row) for row in rows))
print("]")
