"""Generation and log-probs the dumb way: one sequence, no cache, the whole prefix each time."""

from __future__ import annotations

import torch


@torch.no_grad()
def greedy(model, prompt, num_tokens):
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
def logprobs_of(model, tokens, temperature=1.0):
    logits = model(torch.tensor([tokens])).logits[0].double() / temperature
    scores = logits.log_softmax(-1)
    return [float(scores[i, token]) for i, token in enumerate(tokens[1:])]
