"""Errors of photos. In a request with several photos, only the photo fails."""

from __future__ import annotations

from service.core.errors import KithError


class ImageError(KithError):
    """Unusable photo."""

    status = 422


class ImageEmptyError(ImageError):
    code, title = "image_empty", "The photo is empty"
    remedy = "Send the content of the file."


class ImageFormatError(ImageError):
    code, title = "image_format", "The photo format is not supported"
    remedy = "Send JPEG, PNG, WebP, BMP, TIFF, GIF, AVIF or HEIC."


class ImageDamagedError(ImageError):
    code, title = "image_damaged", "The photo is damaged or truncated"
    remedy = "Send the complete file."


class ImageTooLargeError(ImageError):
    status, code, title = 413, "image_too_large", "The photo has too many bytes or pixels"
    remedy = "Shrink the photo. docs/settings.md lists the limits."


class UrlRefusedError(ImageError):
    code, title = "url_refused", "Photos from this URL are not allowed"
    remedy = "Send the photo itself, or an https URL of a host in KITH_URL_HOSTS (docs/rest.md)."


class UrlFailedError(ImageError):
    code, title = "url_failed", "The photo could not be fetched"
    remedy = "Check the URL, or send the photo itself."


class NoFaceError(ImageError):
    code, title = "no_face", "No face was found"
    remedy = "Send a photo with an upright, visible and sufficiently large face."


class SeveralFacesError(ImageError):
    code, title = "several_faces", "The photo shows several faces"
    remedy = "Use a photo of one person, or the largest face: face=largest (--largest-face)."


class LowQualityError(ImageError):
    code, title = "low_quality", "The face quality is too low to enroll"
    remedy = "Use a sharper, better lit, more frontal photo, or 'allow_low_quality' (--allow-low-quality)."


class NotLiveError(ImageError):
    code, title = "not_live", "The face did not pass the liveness check"
    remedy = "Use a photo of the person with room around the face, or 'allow_not_live' (--allow-not-live)."
