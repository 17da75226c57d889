"""Composite modules of torch itself: recurrent nets, attention whose weights are read, encoders."""

import torch
from torch import Tensor, nn

from tests.zoo.case import Case, features

DIM = 16


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.lstm = nn.LSTM(DIM, DIM, num_layers=2, batch_first=True)
        self.gru = nn.GRU(DIM, DIM, batch_first=True)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(self.inp(x))
        x, _ = self.gru(x)
        return self.out(x)


class AttentionUnderRoot(nn.Module):
    """MultiheadAttention reads its projection's weight instead of calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.attention = nn.MultiheadAttention(DIM, 4, batch_first=True)
        self.second = nn.MultiheadAttention(DIM, 4, batch_first=True)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.second(x, x, x)[0]
        return self.out(x)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, 4, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(DIM, 4, 2, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(DIM, DIM)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.transformer(source, target))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


class Gan(nn.Module):
    """A generator and a discriminator trained on one joint loss."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, DIM))
        self.discriminator = nn.Sequential(nn.Linear(DIM, 32), nn.LeakyReLU(), nn.Linear(32, 1))

    def forward(self, real: Tensor) -> Tensor:
        fake = self.generator(torch.randn_like(real))
        return nn.functional.softplus(-self.discriminator(real)).mean() - self.discriminator(fake).mean()


class BagOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, DIM, mode="mean")
        self.bilinear = nn.Bilinear(DIM, DIM, 4)

    def forward(self, ids: Tensor) -> Tensor:
        bag = self.bag(ids)
        return self.bilinear(bag, bag.flip(0))


def pair(seed: int) -> tuple[Tensor, Tensor]:
    return features(2, 5, DIM)(seed), features(2, 4, DIM)(seed + 1000)


def word_ids(seed: int) -> Tensor:
    return torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(seed))


CASES = [
    Case(name="recurrent", build=Recurrent, make_batch=features(2, 5, DIM), four_ranks=True),
    Case(name="attention_under_root", build=AttentionUnderRoot, make_batch=features(2, 5, DIM), four_ranks=True),
    Case(name="transformer_encoder", build=Encoder, make_batch=features(2, 5, DIM)),
    Case(name="nn_transformer", build=EncoderDecoder, make_batch=pair),
    Case(name="conv_net", build=ConvNet, make_batch=features(2, 3, 8, 8)),
    Case(name="gan", build=Gan, make_batch=features(3, DIM), runs_again=("discriminator", "discriminator.*")),
    Case(name="bag_of_words", build=BagOfWords, make_batch=word_ids),
]
