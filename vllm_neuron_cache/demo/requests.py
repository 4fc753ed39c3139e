"""The demo's requests, and the plain form in which requests reach an engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_neuron_cache.demo.checkpoint import IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, chat_prompt
from vllm_neuron_cache.demo.media import PHOTOGRAPHS


@dataclass(frozen=True, kw_only=True)
class MediaRequest:
    """One prompt: text, images by name, the clip, text. Names are resolved by `engine_prompt`."""

    before: str = ""
    images: tuple[str, ...] = ()
    clip: bool = False
    after: str = "Describe this picture in one sentence."

    @property
    def item_keys(self) -> tuple[str, ...]:
        """The items of the prompt in their order, by name."""
        return self.images + (("clip",) if self.clip else ())

    @property
    def prompt(self) -> str:
        placeholders = IMAGE_PLACEHOLDER * len(self.images) + (VIDEO_PLACEHOLDER if self.clip else "")
        return chat_prompt(self.before + placeholders + self.after)


@dataclass(frozen=True, kw_only=True)
class Media:
    """Loaded media, by the names that requests use."""

    images: Mapping[str, Any] = field(default_factory=dict)
    clip: Any = None


def engine_prompt(request: MediaRequest, media: Media) -> dict[str, Any]:
    """The request as vLLM's offline engine takes it."""
    data: dict[str, Any] = {}
    if request.images:
        data["image"] = [media.images[name] for name in request.images]
    if request.clip:
        data["video"] = [media.clip]
    return {"prompt": request.prompt, "multi_modal_data": data} if data else {"prompt": request.prompt}


def demo_requests() -> Sequence[MediaRequest]:
    """Every photograph once, every photograph again under other text, then mixtures, then the clip twice.

    "Other text" stands before the image, so that the KV prefix misses and only the encoder cache can help.
    """
    names = tuple(PHOTOGRAPHS)
    first = [MediaRequest(images=(name,)) for name in names]
    again = [MediaRequest(before=f"Look again at picture {name}. ", images=(name,)) for name in names]
    mixed = [
        MediaRequest(before="Compare these two. ", images=(names[0], names[1])),
        MediaRequest(before="Compare these two. ", images=(names[1], names[0]), after="Which is larger?"),
        MediaRequest(before="The same twice. ", images=(names[2], names[2])),
        MediaRequest(before="All of these. ", images=names[2:6], after="How many are there?"),
        MediaRequest(before="No picture at all. ", after="Who are you?"),
    ]
    clip = [
        MediaRequest(clip=True, after="What happens in this video?"),
        MediaRequest(before="Once more. ", clip=True, after="What happens in this video?"),
        MediaRequest(before="A picture and a video. ", images=(names[3],), clip=True, after="What do they show?"),
    ]
    return [*first, *again, *mixed, *clip]
