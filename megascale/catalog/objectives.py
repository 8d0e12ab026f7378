"""Auxiliary objectives of training, `type` of `[[train.objectives]]`: the registry `OBJECTIVES`.

Facts: the options of an objective, `required` and `optional`, by name their types: int, float or bool. Numbers are
positive. `tokens`: options that are ids of tokens. `documents`: it compares documents, and needs their mask. Targets
are classes of the protocol `parallel.auxiliary_objectives.Objective`.
"""

from megascale.core.registry import Card, Registry

OBJECTIVES = Registry(
    "objective",
    "megascale.objectives",
    [
        Card(
            "jepa",
            "the distance of a document's last hidden state to that of the one before it, which predicts it (LLM-JEPA)",
            "megascale.ops.contrib.jepa:Jepa",
            {
                "required": {"predictor": int},
                "optional": {"dropout": float},
                "tokens": ("predictor",),
                "documents": True,
            },
        ),
    ],
    facts={"required": {}, "optional": {}, "tokens": (), "documents": False},
)
