"""Labels of communications: the tensor, layer, stage and direction as fields, and a text for people."""

from __future__ import annotations

from typing import NamedTuple

FORWARD = "forward"
BACKWARD = "backward"


class Label(NamedTuple):
    """The label of a tensor that is communicated.

    `part`: the tensor or operation, such as "qkv" or "embedding gradient". `layer`: transformer layer, else -1.
    `stage`: virtual pipeline stage that receives a point-to-point message, else -1. `direction`: FORWARD for
    activations, BACKWARD for gradients and for inputs that are all-gathered for wgrad, else "".
    """

    part: str = ""
    layer: int = -1
    stage: int = -1
    direction: str = ""

    @classmethod
    def from_part(cls, label: Label | str) -> Label:
        """Return a label unchanged; make a label without a layer from a text."""
        return label if isinstance(label, Label) else cls(label)

    @classmethod
    def for_layer(cls, layer: int, part: str) -> Label:
        """Return the label of a tensor in a layer's forward pass."""
        return cls(part, layer, direction=FORWARD)

    def with_suffix(self, suffix: str) -> Label:
        """Return the label of a piece of the tensor: "qkv" and the suffix "2/4" give "qkv 2/4"."""
        return Label(f"{self.part} {suffix}" if self.part else suffix, self.layer, self.stage, self.direction)

    def for_backward(self, suffix: str) -> Label:
        """Return the label of a tensor in the backward pass: "qkv" and the suffix "gradient" give "qkv gradient"."""
        return Label(f"{self.part} {suffix}" if self.part else suffix, self.layer, self.stage, BACKWARD)

    def text(self, microbatch: int = -1) -> str:
        """Return the label as text: 'layer 3 qkv', 'embedding gradient', 'forward m2 stage 5'."""
        words = [f"layer {self.layer}"] if self.layer >= 0 else []
        words += [self.part] if self.part else []
        if self.stage >= 0:
            words += [self.direction, *([f"m{microbatch}"] if microbatch >= 0 else []), f"stage {self.stage}"]
        return " ".join(words)


LabelLike = Label | str
"""A label, or only its part."""
