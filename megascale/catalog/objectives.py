"""Auxiliary objectives of training, `type` of `[[train.objectives]]`: the registry `OBJECTIVES`.

Facts: the options of an objective, `required` and `optional`, by name their types: int, float or bool. Numbers are
positive. `document_end`: the option with the token at which an objective of documents splits them, `data.eod`. Targets
are classes of the protocol `parallel.auxiliary_objectives.Objective`.
"""

from megascale.core.registry import Card, Registry

DISTILLATION = "distillation"  # name of the KL to a teacher, a loss of the head that is told of beside the objectives

OBJECTIVES = Registry(
    "objective",
    "megascale.objectives",
    [
        Card(
            "jepa",
            "the distance of a document's last hidden state to that of the one before it, which predicts it (LLM-JEPA)",
            "megascale.ops.contrib.jepa:Jepa",
            {"required": {"predictor": int}, "optional": {}, "document_end": "predictor"},
        ),
    ],
    facts={"required": {}, "optional": {}, "document_end": None},
)
