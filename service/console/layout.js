// Order and labels of the faces in a photo.

const SAME_ROW = 0.75; // distance of two lower edges, in heights of a face, below which labels can collide

/** Sort items from left to right by their faces; items without a face come last. */
export const leftToRight = (items, faceOf = (one) => one.face) =>
  [...items].sort((one, other) => middle(faceOf(one)) - middle(faceOf(other)));

const middle = (face) => (face ? (face.box[0] + face.box[2]) / 2 : Number.MAX_VALUE);

/**
 * The largest width of a label centered below each face, as a share of the face's width, so that labels overlap neither
 * each other nor the edges. `boxes`: [x0, y0, x1, y1] in pixels. `width`: of the photo.
 */
export function labelWidths(boxes, width) {
  return boxes.map((box, i) => {
    const [x0, , x1, y1] = box;
    const at = (x0 + x1) / 2;
    const height = box[3] - box[1];
    const near = boxes.filter((other, j) => j !== i && Math.abs(other[3] - y1) < SAME_ROW * Math.max(height, other[3] - other[1]));
    const free = Math.min(2 * at, 2 * (width - at), ...near.map((other) => Math.abs((other[0] + other[2]) / 2 - at)));
    return Math.max(0, free) / (x1 - x0);
  });
}
