"""Small folders of images with boxes and masks, in the layouts of Pascal VOC and COCO, for the tests."""

import json

import numpy as np
from PIL import Image

ANNOTATION = """<annotation>
	<folder>VOC2007</folder>
	<filename>{name}.jpg</filename>
	<owner><name>?</name></owner>
	<size><width>{width}</width><height>{height}</height><depth>3</depth></size>
	<segmented>0</segmented>
{objects}</annotation>
"""

# A person's parts have names and boxes of their own.
OBJECT = """	<object>
		<name>{name}</name>
		<difficult>{difficult}</difficult>
		<bndbox><xmin>{xmin}</xmin><ymin>{ymin}</ymin><xmax>{xmax}</xmax><ymax>{ymax}</ymax></bndbox>
		<part>
			<name>head</name>
			<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox>
		</part>
	</object>
"""


def photograph(height, width, seed=0):
    """A smooth image, so that JPEG changes it little: (H, W, 3) uint8."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(256, size=(4, 4, 3), dtype=np.uint8))
    return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))


def annotation(name, width, height, *boxes):
    """An XML file's text; a box is (class, xmin, ymin, xmax, ymax, difficult), counted from 1 as VOC does."""
    keys = ("name", "xmin", "ymin", "xmax", "ymax", "difficult")
    objects = "".join(OBJECT.format(**dict(zip(keys, box))) for box in boxes)
    return ANNOTATION.format(name=name, width=width, height=height, objects=objects)


def write_voc(folder, images, split="train"):
    """Write a folder such as VOC2007.

    Args:
        folder: made if need be.
        images: {name: (height, width, boxes)}, see :func:`annotation`; every image also gets a mask, whose upper half
            is 0, whose lower half is 1, with one pixel of 255 between them and one of class 2.
        split: the lists' name.
    """
    for part in ("Annotations", "JPEGImages", "SegmentationClass", "ImageSets/Main", "ImageSets/Segmentation"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for number, (name, (height, width, boxes)) in enumerate(images.items()):
        Image.fromarray(photograph(height, width, number)).save(folder / f"JPEGImages/{name}.jpg", quality=95)
        (folder / f"Annotations/{name}.xml").write_text(annotation(name, width, height, *boxes))
        mask = np.zeros((height, width), np.uint8)
        mask[height // 2 :], mask[height // 2, 0], mask[0, 0] = 1, 255, 2
        picture = Image.fromarray(mask)
        picture.putpalette(list(range(256)) * 3)  # all 256 colours, or 255 would not fit
        picture.save(folder / f"SegmentationClass/{name}.png")
    for kind in ("Main", "Segmentation"):
        (folder / f"ImageSets/{kind}/{split}.txt").write_text("".join(f"{name}\n" for name in images))


CATEGORIES = [
    {"supercategory": "person", "id": 1, "name": "person"},
    {"supercategory": "animal", "id": 18, "name": "dog"},
    {"supercategory": "indoor", "id": 90, "name": "toothbrush"},
]


def coco_box(number, image, category, bbox, iscrowd=0):
    """An annotation as COCO's files have it; a crowd's outline is run lengths, others' are polygons."""
    x, y, width, height = bbox
    polygon = [[x, y, x + width, y, x + width, y + height, x, y + height]]
    outline = {"counts": [0, 1], "size": [1, 1]} if iscrowd else polygon
    return {
        "segmentation": outline, "area": width * height, "iscrowd": iscrowd, "image_id": image, "bbox": list(bbox),
        "category_id": category, "id": number,
    }  # fmt: skip


def write_coco(folder, sizes, boxes, split="val2017", images="{split}"):
    """Write a folder such as COCO's, and return the content of its annotations.

    Args:
        folder: made if need be.
        sizes: {image id: (height, width)}.
        boxes: see :func:`coco_box`.
        split: the name of its file.
        images: where the images lie, below the folder.
    """
    target = folder / images.format(split=split)
    target.mkdir(parents=True, exist_ok=True)
    (folder / "annotations").mkdir(exist_ok=True)
    entries = []
    for image, (height, width) in sizes.items():
        name = f"{image:012d}.jpg"
        Image.fromarray(photograph(height, width, image)).save(target / name, quality=95)
        url = f"images.example/{split}/{name}"
        entries.append({"id": image, "file_name": name, "height": height, "width": width, "coco_url": url})
    content = {"info": {}, "licenses": [], "images": entries, "annotations": boxes, "categories": CATEGORIES}
    (folder / f"annotations/instances_{split}.json").write_text(json.dumps(content))
    return content


# of three images, (height, width) each, and what is annotated in them
SIZES = {139: (40, 50), 7: (30, 60), 632: (48, 32)}
BOXES = [
    coco_box(1, 139, 90, (10.5, 11.25, 20.5, 8.75)),
    coco_box(2, 7, 1, (0, 0, 60, 30)),
    coco_box(3, 139, 18, (3, 4, 20, 30), iscrowd=1),
    coco_box(4, 139, 1, (20.13, 5, 29.87, 34.99)),
]
