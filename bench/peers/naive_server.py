"""A minimal server: FastAPI around FaceAnalysis, like the examples in both READMEs.

NAIVE_PACK=DIRECTORY uvicorn bench.peers.naive_server:app

NAIVE_SIDE: the detector's canvas, if it differs from the READMEs' 640.
"""

import os
from typing import Any

import cv2
import numpy as np
from fastapi import FastAPI, HTTPException, UploadFile
from insightface.app import FaceAnalysis

app = FastAPI()
analysis = FaceAnalysis(name=os.environ["NAIVE_PACK"], providers=["CPUExecutionProvider"])
side = int(os.environ.get("NAIVE_SIDE", "640"))
analysis.prepare(ctx_id=-1, det_size=(side, side))


@app.post("/faces")
def faces(image: UploadFile) -> dict[str, Any]:
    photo = cv2.imdecode(np.frombuffer(image.file.read(), np.uint8), cv2.IMREAD_COLOR)
    if photo is None:
        raise HTTPException(400, "not a photo")
    return {
        "faces": [
            {
                "bbox": face.bbox.tolist(),
                "kps": face.kps.tolist(),
                "det_score": float(face.det_score),
                "embedding": face.normed_embedding.tolist(),
            }
            for face in analysis.get(photo)
        ]
    }
