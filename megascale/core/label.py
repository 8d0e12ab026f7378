"""Labels of communications: fields for programs, and a text for people."""

from __future__ import annotations

from typing import NamedTuple

FORWARD = "forward"
BACKWARD = "backward"


class Label(NamedTuple):
    """`part`: the tensor or operation, such as "qkv" or "embedding gradient"; `layer`: the transformer layer that it
    belongs to; `stage`: the virtual stage at which a message of the pipeline arrives; each -1 where there is none.
    `direction`: FORWARD for activations, BACKWARD for gradients and for what is gathered for them, "" for all else.
    """

    part: str = ""
    layer: int = -1
    stage: int = -1
    direction: str = ""

    @classmethod
    def of(cls, what: Label | str) -> Label:
        """Return the label itself, or one of a part that belongs to no layer."""
        return what if isinstance(what, Label) else cls(what)

    @classmethod
    def of_layer(cls, layer: int, part: str) -> Label:
        """Return the label of a tensor of a layer's forward."""
        return cls(part, layer, direction=FORWARD)

    def then(self, more: str) -> Label:
        """Return the label of a piece, or of a companion, of the same tensor: "qkv", then "2/4"."""
        return Label(f"{self.part} {more}" if self.part else more, self.layer, self.stage, self.direction)

    def backward(self, more: str) -> Label:
        """Return the label of a tensor of the backward that belongs to this one: "qkv", then "gradient"."""
        return Label(f"{self.part} {more}" if self.part else more, self.layer, self.stage, BACKWARD)

    def text(self, microbatch: int = -1) -> str:
        """Return the label for people: 'layer 3 qkv', 'embedding gradient', 'forward m2 stage 5'."""
        words = [f"layer {self.layer}"] if self.layer >= 0 else []
        words += [self.part] if self.part else []
        if self.stage >= 0:
            words += [self.direction, *([f"m{microbatch}"] if microbatch >= 0 else []), f"stage {self.stage}"]
        return " ".join(words)


What = Label | str
"""A label, or only the part that it would have."""
