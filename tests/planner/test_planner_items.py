"""Sizes of media as they are written on the command line and in files."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_neuron_cache.errors import PlannerError
from vllm_neuron_cache.planner.items import DEFAULT_SIZES, MediaSize, parse_size, parse_sizes, read_sizes_file

sizes = st.one_of(
    st.builds(MediaSize, width=st.integers(0, 10**6), height=st.integers(0, 10**6)),
    st.builds(MediaSize, width=st.integers(0, 10**6), height=st.integers(0, 10**6), frames=st.integers(0, 10**4)),
    st.builds(MediaSize, seconds=st.integers(0, 10**5).map(float)),
)


def refusal(function, *arguments):
    with pytest.raises(PlannerError) as caught:
        function(*arguments)
    return str(caught.value)


@given(size=sizes)
def test_a_label_is_read_as_the_size_it_names(size):
    assert parse_size(size.label, "here") == size


def test_sizes_between_commas():
    assert parse_sizes(" 512x384, 640X480x30 ,2.5s") == (
        MediaSize(width=512, height=384),
        MediaSize(width=640, height=480, frames=30),
        MediaSize(seconds=2.5),
    )
    assert [size.modality for size in parse_sizes("1x1,1x1x1,1s")] == ["image", "video", "audio"]
    assert {size.modality for size in DEFAULT_SIZES} == {"image"}


@pytest.mark.parametrize(
    "text", ["512", "512x", "x512", "512x512x", "-1x5", "5.5x5", "s", "1x2x3x4", "512 x 512", "512*512"]
)
def test_what_is_no_size(text):
    message = refusal(parse_sizes, text)
    assert message.startswith(f"--sizes: {text!r} is not a size") and "WIDTHxHEIGHT for an image" in message


@pytest.mark.parametrize("text", ["", " ", ",,"])
def test_no_size_at_all(text):
    assert "--sizes names no size" in refusal(parse_sizes, text)


def test_a_file_of_lines(tmp_path):
    file = tmp_path / "sizes.txt"
    file.write_text("# what came last week\n512x512 300\n\n1024x768x16 4  # clips\n  30s\n")
    assert read_sizes_file(file) == (
        MediaSize(width=512, height=512, count=300),
        MediaSize(width=1024, height=768, frames=16, count=4),
        MediaSize(seconds=30.0),
    )


def test_a_file_of_json(tmp_path):
    file = tmp_path / "sizes.json"
    file.write_text('["512x512", ["1024x768", 3]]')
    assert read_sizes_file(file) == (MediaSize(width=512, height=512), MediaSize(width=1024, height=768, count=3))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("512x512\n12 3", "line 2: '12' is not a size"),
        ("512x512 0", "line 1: the count is 0"),
        ("\n512x512 many", "line 2: the count is 'many'"),
        ("512x512 1.5", "line 1: the count is '1.5'"),
        ("512x512 1 2", "line 1: give one size"),
        ("512 x 512", "line 1: give one size"),
        ("# nothing", "names no size"),
        ("", "names no size"),
        ("[", "begins as JSON and is not"),
        ("{}", "holds no list"),
        ("[]", "names no size"),
        ("[5]", "entry 1: 5 is neither"),
        ('["512x512", ["1x1", 2, 3]]', "entry 2: "),
        ('["512x512", ["1x1", true]]', "entry 2: the count is True"),
        ('["512"]', "entry 1: '512' is not a size"),
    ],
)
def test_mistakes_in_a_file_are_named_with_their_place(tmp_path, text, words):
    file = tmp_path / "sizes"
    file.write_text(text)
    message = refusal(read_sizes_file, file)
    assert words in message and str(file) in message


def test_files_that_cannot_be_read(tmp_path):
    assert "No such file" in refusal(read_sizes_file, tmp_path / "nowhere")
    (tmp_path / "picture").write_bytes(b"\xff\xd8\xff")
    assert "not UTF-8 text" in refusal(read_sizes_file, tmp_path / "picture")
