"""The tutorial's Transformer."""

import torch

from shardwise.models.transformer import Transformer, TransformerConfig


def test_tokens_do_not_see_the_future():
    config = TransformerConfig(num_layers=2, width=32)
    model = Transformer(config)
    tokens = torch.randint(0, config.vocab_size, (1, 12))
    changed = tokens.clone()
    changed[0, 8:] = 0
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[:, :8], model(changed)[:, :8])
        assert not torch.equal(model(tokens)[:, 8:], model(changed)[:, 8:])


def test_position_matters():
    model = Transformer(TransformerConfig(num_layers=1, width=32))
    with torch.no_grad():
        logits = model(torch.full((1, 4), 7))
    assert not torch.allclose(logits[0, 0], logits[0, 1])


def test_every_parameter_gets_a_gradient():
    model = Transformer(TransformerConfig(num_layers=2, width=32, max_sequence_length=8))
    model(torch.randint(0, 256, (2, 8))).square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
