"""An untouched script whose model returns its loss, as the skill's wrapper runs it."""

import torch
from my_project import Model, Tokens, loss_sum  # pyrefly: ignore[missing-import]


class WithLoss(Model):
    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = super().forward(tokens)
        return logits, loss_sum(logits, labels) / (labels != -100).sum()


if __name__ == "__main__":
    torch.manual_seed(0)
    model = WithLoss()
    for index in range(3):
        tokens, labels = (x.unsqueeze(0) for x in Tokens()[index])
        _, loss = model(tokens, labels)
        loss.backward()
        print(f"{loss.item():.2f}")
