// EXIF orientation of WebP. Browsers apply it to JPEG, PNG and AVIF only. The service applies it to all formats, and its
// boxes refer to the upright photo.

const ORIENTATION = 0x0112;

/** The EXIF orientation, 1 to 8, of a WebP (`bytes`: an ArrayBuffer; RFC 9649); 1 if it has none. */
export function orientationOfWebp(bytes) {
  const view = new DataView(bytes);
  const name = (at) => String.fromCharCode(...new Uint8Array(bytes, at, 4));
  if (view.byteLength < 20 || name(0) !== "RIFF" || name(8) !== "WEBP") return 1;
  for (let at = 12; at + 8 <= view.byteLength;) {
    const size = view.getUint32(at + 4, true);
    if (name(at) === "EXIF")
      return orientationOfExif(new DataView(bytes, at + 8, Math.min(size, view.byteLength - at - 8)));
    at += 8 + size + (size % 2);
  }
  return 1;
}

function orientationOfExif(view) {
  try {
    const start = view.getUint32(0) === 0x45786966 ? 6 : 0; // some encoders write the "Exif\0\0" of JPEG
    const little = view.getUint16(start) === 0x4949;
    const first = start + view.getUint32(start + 4, little);
    for (let entry = 0; entry < view.getUint16(first, little); entry += 1) {
      const at = first + 2 + 12 * entry;
      if (view.getUint16(at, little) !== ORIENTATION) continue;
      const found = view.getUint16(at + 8, little);
      return found >= 1 && found <= 8 ? found : 1;
    }
  } catch (error) {
    if (!(error instanceof RangeError)) throw error; // truncated EXIF counts as none
  }
  return 1;
}

/** The matrix for a canvas' `setTransform` that turns `width` x `height` pixels upright. From 5 on the sides are swapped. */
export function upright(orientation, width, height) {
  return {
    1: [1, 0, 0, 1, 0, 0],
    2: [-1, 0, 0, 1, width, 0],
    3: [-1, 0, 0, -1, width, height],
    4: [1, 0, 0, -1, 0, height],
    5: [0, 1, 1, 0, 0, 0],
    6: [0, 1, -1, 0, height, 0],
    7: [0, -1, -1, 0, height, width],
    8: [0, -1, 1, 0, 0, width],
  }[orientation];
}
