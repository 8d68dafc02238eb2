"""Images in the messages of a conversation: data URLs, decoded within limits. Nothing is fetched."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .refusals import Refusal, wrong

if TYPE_CHECKING:
    from PIL.Image import Image

#: Limits of a request: number of images, and pixels of all images together, since a small file may hold very many pixels.
MOST, PIXELS = 16, 1 << 24
#: Error code for refused images.
INVALID = "invalid_image"
#: Formats that are decoded.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def image_of(part: Mapping[str, Any], param: str, others: Sequence[Image]) -> Image:
    """The image in a part of a message, ``{"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}``.

    Args:
        param: the part's name in error messages.
        others: earlier images of the same request.

    Raises:
        Refusal: the value is not a data URL, or not an image, or the images are too many or too large.
    """
    if len(others) == MOST:
        raise wrong(param, f"there are more than {MOST} images, which is the limit", INVALID)
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or not url.startswith("data:"):
        shown = f", not {url[:40]!r}" if isinstance(url, str) else ' in {"image_url": {"url": …}}'
        message = f"the server fetches nothing: an image must be a data URL (data:image/png;base64,…){shown}"
        raise wrong(param, message, INVALID)
    head, _, content = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError(head)
        data = base64.b64decode("".join(content.split()), validate=True)
    except ValueError as error:
        raise wrong(param, "the data URL is not in base64: give data:image/png;base64,…", INVALID) from error
    return _decoded(data, param, PIXELS - sum(image.width * image.height for image in others))


def _decoded(data: bytes, param: str, most: int) -> Image:
    from PIL import Image, UnidentifiedImageError
    from transformers.image_utils import load_image

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)  # reads the file's header only
        width, height = image.size
        if width * height > most:
            message = f"the image has {width} x {height} pixels; the limit is {PIXELS} in all images of a request"
            raise wrong(param, message, INVALID)
        return load_image(image)  # rotated upright and converted to RGB, as in other programs
    except Refusal:
        raise
    except Exception as error:  # Pillow's image readers raise exceptions of any class
        reason = "of no known format" if isinstance(error, UnidentifiedImageError) else error
        raise wrong(param, f"the image cannot be read ({reason}): formats are {', '.join(FORMATS)}", INVALID) from error
