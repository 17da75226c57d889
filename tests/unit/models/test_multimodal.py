"""The reference multimodal model: what sees what, what learns, and drawing in steps."""

import torch
from torch.nn.functional import pixel_unshuffle

from shardwise.models.multimodal import SHAPES, Context, Multimodal
from shardwise.models.pictures import captioned_shapes

DEBUG = SHAPES["multimodal-debug"]


def build() -> Multimodal:
    torch.manual_seed(0)
    return Multimodal(DEBUG)


def batch_of(num: int) -> dict[str, torch.Tensor]:
    items = [captioned_shapes()[index] for index in range(num)]
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


def fixed_noise(rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shape = (rows, DEBUG.latent_grid**2, DEBUG.latent_size)
    return {"noise": torch.randn(shape, generator=generator), "times": torch.rand(rows, generator=generator)}


def test_the_large_shape_has_bagels_size():
    with torch.device("meta"):
        model = Multimodal(SHAPES["multimodal-14b"])
    assert 14.0e9 < sum(p.numel() for p in model.language_model.parameters()) < 14.5e9


def test_loss_has_a_part_of_words_and_one_of_pictures_and_everything_but_the_autoencoder_learns():
    model = build()
    losses = model(**batch_of(2))
    torch.testing.assert_close(losses["loss"], losses["text_loss"] + losses["image_loss"])
    losses["loss"].backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None and parameter.grad.any()) != name.startswith("vae_model."), name


def test_words_depend_on_the_picture_seen_but_not_on_the_one_to_draw():
    model, batch, noise = build(), batch_of(2), fixed_noise(2)
    with torch.no_grad():
        before = model(**batch, **noise)
        drawn = model(**{**batch, "target_pixels": -batch["target_pixels"]}, **noise)
        seen = model(**{**batch, "pixel_values": -batch["pixel_values"]}, **noise)
    torch.testing.assert_close(before["text_loss"], drawn["text_loss"])
    assert before["text_loss"] != seen["text_loss"]
    assert before["image_loss"] != drawn["image_loss"]


def test_evaluation_gives_the_loss_of_training():
    model, batch, noise = build(), batch_of(2), fixed_noise(2)
    with torch.no_grad():
        training = model(**batch, **noise)["loss"]
        torch.testing.assert_close(model.eval()(**batch, **noise)["loss"], training)


def test_reading_in_two_calls_equals_reading_at_once():
    model, batch = build(), batch_of(2)
    ids = batch["input_ids"]
    latents, times = fixed_noise(2)["noise"], torch.tensor([0.3, 0.9])
    seen = model.forward_cache_update_vit(batch["pixel_values"])
    whole = model.forward_cache_update_text(ids, seen)
    parts = model.forward_cache_update_text(ids[:, 5:], model.forward_cache_update_text(ids[:, :5], seen))
    assert whole.position == parts.position == 1 + ids.shape[1]
    torch.testing.assert_close(
        model.forward_inference(latents, times, whole), model.forward_inference(latents, times, parts)
    )
    assert model.training


def test_drawing_direction_equals_that_of_the_training_forward():
    """The steps of generation compute what was learnt: one cached step equals the forward over the whole sequence."""
    model, batch, noise = build(), batch_of(2), fixed_noise(2)
    seen = model.forward_cache_update_vit(batch["pixel_values"])
    context = model.forward_cache_update_text(batch["input_ids"], seen)
    with torch.no_grad():
        encoded = model.vae_model.encode(batch["target_pixels"])
        latents = pixel_unshuffle(encoded, model.config.latent_patch_size).flatten(2).transpose(1, 2)
        mixed = torch.lerp(latents, noise["noise"], noise["times"][:, None, None])
        direction = model.forward_inference(mixed, noise["times"], context)
        expected = model(**batch, **noise)["image_loss"]
    torch.testing.assert_close((direction - (noise["noise"] - latents)).square().mean(), expected)


def test_pictures_are_drawn_for_a_text_and_follow_it():
    model, batch = build(), batch_of(2)

    def draw(ids: torch.Tensor) -> torch.Tensor:
        return model.generate_image(ids, num_steps=2, generator=torch.Generator().manual_seed(0))

    picture = draw(batch["input_ids"])
    assert picture.shape == batch["target_pixels"].shape
    assert torch.equal(picture, draw(batch["input_ids"]))
    assert not torch.equal(picture, draw(batch["input_ids"].flip(1)))


def test_an_empty_context_starts_at_the_first_position():
    context = build().forward_cache_update_text(torch.tensor([[1, 2, 3]]), Context())
    assert context.position == 3
    assert context.cache is not None
    assert context.cache[0][0].shape == (1, DEBUG.num_kv_heads, 3, DEBUG.head_dim)


def test_samples_of_pictures_are_numbered_and_say_what_they_show():
    shapes = captioned_shapes()
    first, again, other = shapes[0], shapes[0], shapes[1]
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["target_pixels"], other["target_pixels"])
    captions = {bytes(t for t in shapes[i]["input_ids"].tolist() if t < 256).decode() for i in range(64)}
    assert any("red" in caption for caption in captions)
    assert len(captions) > 20
    assert list(shapes[0]["target_pixels"].shape) == [3, 16, 16]
    assert len([*captioned_shapes(num_samples=3)]) == 3
