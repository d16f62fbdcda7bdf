// Order and labels of the faces in a photo.

const SAME_ROW = 0.75; // distance of two lower edges, in heights of a face, below which labels can collide
const ROW_REACH = 0.75; // distance from the middle of a row, in heights of its faces, within which a face belongs to it

/** Sort items as one reads: rows of faces from top to bottom, each from left to right. Items without a face come last. */
export function readingOrder(items, faceOf = (one) => one.face) {
  const faces = items.filter(faceOf).map((item) => {
    const [x0, y0, x1, y1] = faceOf(item).box;
    return { item, x: (x0 + x1) / 2, y: (y0 + y1) / 2, height: y1 - y0 };
  });
  const rows = [];
  for (const face of faces.sort((one, other) => one.y - other.y)) {
    const row = rows.at(-1);
    const near = row && face.y - mean(row, "y") < ROW_REACH * mean(row, "height");
    if (near) row.push(face);
    else rows.push([face]);
  }
  const ordered = rows.flatMap((row) => row.sort((one, other) => one.x - other.x).map((face) => face.item));
  return [...ordered, ...items.filter((item) => !faceOf(item))];
}

const mean = (row, name) => row.reduce((sum, face) => sum + face[name], 0) / row.length;

/**
 * The largest width of a label centered below each face, as a share of the face's width, so that labels overlap neither
 * each other nor the edges. `boxes`: [x0, y0, x1, y1] in pixels. `width`: of the photo.
 */
export function labelWidths(boxes, width) {
  return boxes.map((box, i) => {
    const [x0, , x1, y1] = box;
    const at = (x0 + x1) / 2;
    const height = box[3] - box[1];
    const near = boxes.filter(
      (other, j) => j !== i && Math.abs(other[3] - y1) < SAME_ROW * Math.max(height, other[3] - other[1]),
    );
    const free = Math.min(2 * at, 2 * (width - at), ...near.map((other) => Math.abs((other[0] + other[2]) / 2 - at)));
    return Math.max(0, free) / (x1 - x0);
  });
}
