// EXIF orientation of WebP.

import assert from "node:assert/strict";
import { test } from "node:test";
import { orientationOfWebp, upright } from "../../service/console/orientation.js";

function webp(orientation, { little = true, prefix = "", keep = Infinity } = {}) {
  const exif = new DataView(new ArrayBuffer(26));
  exif.setUint16(0, little ? 0x4949 : 0x4d4d);
  exif.setUint16(2, 42, little);
  exif.setUint32(4, 8, little);
  exif.setUint16(8, 1, little);
  exif.setUint16(10, 0x0112, little);
  exif.setUint16(12, 3, little);
  exif.setUint32(14, 1, little);
  exif.setUint16(18, orientation, little);
  const body = Buffer.concat([Buffer.from(prefix, "latin1"), Buffer.from(exif.buffer)]);
  const chunk = (name, content) => {
    const size = Buffer.alloc(4);
    size.writeUInt32LE(content.length);
    return Buffer.concat([Buffer.from(name), size, content, Buffer.alloc(content.length % 2)]);
  };
  const file = Buffer.concat([Buffer.from("RIFF\0\0\0\0WEBP"), chunk("VP8X", Buffer.alloc(11)), chunk("EXIF", body)]);
  const cut = file.subarray(0, Math.min(file.length, keep));
  return cut.buffer.slice(cut.byteOffset, cut.byteOffset + cut.length);
}

test("orientation is read in both byte orders, with and without the JPEG prefix", () => {
  for (const little of [true, false])
    for (const prefix of ["", "Exif\0\0"]) assert.equal(orientationOfWebp(webp(6, { little, prefix })), 6);
});

test("orientation is 1 without WebP, without EXIF and if truncated", () => {
  assert.equal(orientationOfWebp(new ArrayBuffer(0)), 1);
  assert.equal(orientationOfWebp(new ArrayBuffer(64)), 1);
  assert.equal(orientationOfWebp(webp(9)), 1);
  for (let keep = 0; keep < 58; keep += 1) assert.ok([1, 6].includes(orientationOfWebp(webp(6, { keep }))));
});

test("corners map to corners", () => {
  const [width, height] = [40, 30];
  for (let orientation = 1; orientation <= 8; orientation += 1) {
    const [a, b, c, d, e, f] = upright(orientation, width, height);
    const sides = orientation < 5 ? [width, height] : [height, width];
    const corners = [
      [0, 0],
      [width, 0],
      [0, height],
      [width, height],
    ].map(([x, y]) => `${a * x + c * y + e},${b * x + d * y + f}`);
    const [w, h] = sides;
    assert.deepEqual(new Set(corners), new Set(["0,0", `${w},0`, `0,${h}`, `${w},${h}`]));
  }
});
