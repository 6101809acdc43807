"""The drawn steps of these tests, by a name that says how to draw them again."""

import functools
import itertools

import cuda_types
import drawn
import drawn_attention
import drawn_fields
import drawn_graph_fields
import drawn_models
import drawn_options
import drawn_storage
import drawn_zoo
import generated

SCALES = (1, 64)
"""Times the samples of those steps of ``generated`` that can have more."""
FAMILIES = {
    "drawn_storage": (drawn_storage.FAMILIES, drawn_storage.draw_storage_step),
    "drawn_models": (drawn_models.FAMILIES, drawn_models.draw_model_step),
    "drawn_zoo": (drawn_zoo.KINDS, drawn_zoo.draw_zoo_step),
    "drawn_fields": (drawn_fields.KINDS, drawn_fields.draw_field_step),
    "drawn_graph_fields": (
        drawn_graph_fields.KINDS,
        drawn_graph_fields.draw_graph_field_step,
    ),
    "drawn_options": (drawn_options.KINDS, drawn_options.draw_option_step),
}


def named_steps(seeds):
    """Give by its name what makes each step: model, batch and how it is trained.

    ``seeds`` are those of which each family is drawn.
    """
    steps = {}
    for name, scale in itertools.product(generated.NAMES, SCALES):
        make = functools.partial(generated.make_step, name, scale)
        steps[f"{name} x {scale}"] = make
    for seed in seeds:
        steps[f"drawn: None {seed}"] = functools.partial(_draw, drawn.draw_step, seed)
        make = functools.partial(_draw, drawn_attention.draw_attention, seed)
        steps[f"drawn_attention: {seed}"] = make
    for module, (families, draw) in FAMILIES.items():
        for family, seed in itertools.product(families, seeds):
            make = functools.partial(_draw, draw, seed, family)
            steps[f"{module}: {family} {seed}"] = make
    return steps | cuda_types.named()


def _draw(draw, *arguments):
    step = draw(*arguments)
    return step.model, step.batch, step.step
