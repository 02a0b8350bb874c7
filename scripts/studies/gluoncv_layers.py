"""Calls of GluonCV's layers, metrics, loaders and drawings, and GluonNLP's, by name; `gluoncv_functions.py` runs them."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

import numpy as np
from gluoncv_transforms import Case, boxes, gradient, ids, image, module, net_of, uniform

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd


def output(block, *data):
    block.initialize(mx.init.One())
    return block(*data)


def layers() -> dict[str, Case]:
    nn, coder, sampler, matcher = module("nn"), module("nn.coder"), module("nn.sampler"), module("nn.matcher")
    block, corners = module("nn.block"), nd.array(np.tile(boxes()[:, :4], (2, 1, 1)))
    anchors, ious = nd.array(uniform(1, 9, 4, high=50)), nd.array(uniform(2, 9, 2))
    matches, samples = nd.array([[0, 1, -1] * 3] * 2), nd.array([[1, 1, -1] * 3] * 2)
    refs = corners
    shuffled = sampler.QuotaSampler
    numpy_anchors, numpy_refs = uniform(1, 9, 4, high=50), boxes()[None, :, :4]
    images = nd.array(uniform(2, 3, 32, 32))
    return {
        "BBoxes": lambda: [nn.bbox.BBoxCornerToCenter()(corners), nn.bbox.NumPyBBoxCornerToCenter()(boxes()[:, :4]),
                           nn.bbox.BBoxArea()(corners), nn.bbox.BBoxBatchIOU()(corners, corners)],
        "BBoxClipToImage": lambda: nn.bbox.BBoxClipToImage()(corners, nd.zeros((2, 3, 30, 30))),
        "Consensus": lambda: output(block.Consensus(2, 3), nd.array(uniform(6, 2))),
        "DSNT": lambda: output(block.DSNT(8), nd.array(uniform(1, 2, 8, 8))),
        "DUC": lambda: output(block.DUC(8), nd.array(uniform(1, 4, 8, 8))),
        "HardSwish": lambda: output(block.HardSwish(), images),
        "CenterNetDecoder": lambda: coder.CenterNetDecoder(5)(
            nd.array(uniform(1, 2, 8, 8)), nd.array(uniform(1, 2, 8, 8)), nd.array(uniform(1, 2, 8, 8))),
        "MultiClassDecoder": lambda: coder.MultiClassDecoder()(nd.array(uniform(2, 9, 4))),
        "MultiPerClassDecoder": lambda: coder.MultiPerClassDecoder(4)(nd.array(uniform(2, 9, 4))),
        "MultiClassEncoder": lambda: coder.MultiClassEncoder()(samples, matches, nd.array([[0, 1]] * 2)),
        "NormalizedBoxCenterDecoder": lambda: coder.NormalizedBoxCenterDecoder()(nd.array(uniform(2, 9, 4)), anchors),
        "NormalizedBoxCenterEncoder": lambda: coder.NormalizedBoxCenterEncoder()(
            samples, matches, nd.array(uniform(2, 9, 4, high=50)), refs),
        "NumPyNormalizedBoxCenterEncoder": lambda: coder.NumPyNormalizedBoxCenterEncoder()(
            samples.asnumpy()[:1], matches.asnumpy()[:1].astype(int), numpy_anchors, numpy_refs),
        "SigmoidClassEncoder": lambda: coder.SigmoidClassEncoder()(samples),
        "matchers": lambda: [matcher.MaximumMatcher(0.5)(ious), matcher.BipartiteMatcher()(ious), matcher.CompositeMatcher(
            [matcher.BipartiteMatcher(), matcher.MaximumMatcher(0.5)])(ious)],
        "QuotaSampler": lambda: shuffled(4, 0.6, 0.4)(matches, ious),
        "QuotaSamplerOp": lambda: nd.Custom(matches, ious, op_type="quota_sampler", num_sample=4, pos_thresh=0.6),
        "OHEMSampler": lambda: sampler.OHEMSampler(2)(matches, nd.array(uniform(2, 9, 3)), ious),
        "GroupNorm": lambda: output(nn.gn.GroupNorm(2, 4), nd.array(uniform(2, 4, 3, 3))),
        "DropBlock": lambda: output(nn.dropblock.DropBlock(0.5, 3, 3, 32, 32), images),
        "SplitAttentionConv": lambda: output(nn.splat.SplitAttentionConv(64, 3, in_channels=4, padding=(1, 1)), nd.array(uniform(2, 4, 8, 8))),
        "RPN's anchors": lambda: output(module("model_zoo.rcnn.rpn.anchor").RPNAnchorGenerator(
            16, 16, (0.5, 1, 2), (8, 16), (8, 8)), nd.zeros((1, 3, 4, 4))),
        "freeze_bn, set_lr_mult": lambda: [
            module("utils").freeze_bn(net_of("cifar_resnet20_v1")) or 0, module("utils").set_lr_mult(
                net_of("cifar_resnet20_v1"), ".*weight", 0.1) or 0],
    }  # fmt: skip


NETS = {  # of each family, with the size of an image, or the shape of a batch
    "alexnet": 224, "cifar_resnet20_v1": 32, "cifar_resnext29_16x4d": 32, "cifar_wideresnet16_10": 32, "densenet121": 224,
    "dla34": 64, "googlenet": 224, "hrnet_w18_small_v1_c": 64, "inceptionv3": 299, "mobilenet0.25": 64,
    "mobilenetv3_small": 64, "residualattentionnet56": 224, "resnest14": 64, "resnet18_v1b": 64, "resnext50_32x4d": 64,
    "se_resnet18_v1": 64, "shufflenet_v1": 224, "squeezenet1.1": 64, "vgg11": 64, "xception": 96, "nasnet_4_1056": 64,
    "fcn_resnet50_voc": (1, 3, 480, 480), "deeplab_resnet50_voc": (1, 3, 480, 480), "psp_resnet50_voc": (1, 3, 480, 480),
    "icnet_resnet50_citys": (1, 3, 480, 480), "fastscnn_citys": (1, 3, 1024, 1024), "danet_resnet50_citys": (1, 3, 480, 480),
    "ssd_300_vgg16_atrous_voc": 300, "ssd_512_resnet50_v1_voc": 512, "yolo3_darknet53_voc": 64,
    "yolo3_mobilenet1.0_voc": 64, "center_net_resnet18_v1b_voc": 64, "faster_rcnn_resnet50_v1b_voc": 128,
    "faster_rcnn_fpn_resnet50_v1b_coco": 128, "mask_rcnn_resnet18_v1b_coco": 128, "mask_rcnn_fpn_resnet50_v1b_coco": 128,
    "simple_pose_resnet18_v1b": 64, "alpha_pose_resnet101_v1b_coco": 64, "mobile_pose_resnet18_v1b": 64,
    "resnet18_v1b_kinetics400": 224, "c3d_kinetics400": (1, 3, 16, 112, 112), "i3d_resnet50_v1_kinetics400": (1, 3, 8, 64, 64),
    "slowfast_4x16_resnet50_kinetics400": (1, 3, 36, 64, 64), "r2plus1d_resnet18_kinetics400": (1, 3, 8, 64, 64),
    "monodepth2_resnet18_kitti_mono_stereo_640x192": (1, 3, 192, 640), "siamrpn_alexnet_v2_otb15": None,
}  # fmt: skip


def nets() -> dict[str, Case]:
    """A forward pass of a net of each family, of which only shapes are compared: initial weights are random."""

    def forward(name: str, shape: tuple[int, ...]):
        found = net_of(name)(nd.array(uniform(*shape)))
        return [one.shape for one in (found if isinstance(found, (tuple, list)) else [found]) if hasattr(one, "shape")]

    def siam():
        net = net_of("siamrpn_alexnet_v2_otb15")
        return [one.shape for one in net(nd.array(uniform(1, 3, 127, 127)), nd.array(uniform(1, 3, 287, 287)))]

    shapes = {name: (1, 3, size, size) if isinstance(size, int) else size for name, size in NETS.items()}
    return {f"net {name}": siam if shape is None else lambda name=name, shape=shape: forward(name, shape)
            for name, shape in shapes.items()}  # fmt: skip


def metrics() -> dict[str, Case]:
    rcnn, voc, tracking, segmentation, heatmap, accuracy = (
        module(f"utils.metrics.{name}")
        for name in ("rcnn", "voc_detection", "tracking", "segmentation", "heatmap_accuracy", "accuracy")
    )
    one_hot = nd.array((uniform(2, 3) > 0.5).astype("float32"))

    def scored(metric, *arguments):
        metric.update(*arguments)
        return metric.get()[1]

    def detections(kind):
        rows, metric = nd.array(boxes()[None, :, :4]), kind(0.5, ["a", "b"])
        metric.update([rows], [ids(0, 1)], [ids(0.9, 0.8)], [rows], [ids(0, 1)], [ids(0, 0)])
        metric.update([rows], [ids(0, 1)], [ids(0.9, 0.8)], [rows + 9], [ids(0, 1)], None)
        return metric.get()[1]

    line = {"gt": [boxes()[0, :4]] * 3, "found": [boxes()[1, :4]] * 3}
    return {
        "VOCMApMetric": lambda: detections(voc.VOCMApMetric),
        "VOC07MApMetric": lambda: detections(voc.VOC07MApMetric),
        "SegmentationMetric": lambda: scored(segmentation.SegmentationMetric(4), nd.array([[[0, 1], [2, 3]]]),
                                             nd.array(uniform(1, 4, 2, 2))),
        "pixelAccuracy": lambda: segmentation.pixelAccuracy(np.array([[0, 1]]), np.array([[0, 0]])),
        "intersectionAndUnion": lambda: segmentation.intersectionAndUnion(np.array([[0, 1]]), np.array([[0, 0]]), 2),
        "HeatmapAccuracy": lambda: scored(heatmap.HeatmapAccuracy(), [nd.array(uniform(2, 3, 16, 12))],
                                          [nd.array(uniform(2, 3, 16, 12, seed=5))]),
        "Accuracy": lambda: scored(accuracy.Accuracy(), [nd.array([0, 1])], [nd.array(uniform(2, 3))]),
        "RPNAccMetric": lambda: scored(rcnn.RPNAccMetric(), [one_hot, one_hot], [one_hot]),
        "RPNL1LossMetric": lambda: scored(rcnn.RPNL1LossMetric(), [one_hot, one_hot], [one_hot]),
        "RCNNAccMetric": lambda: scored(rcnn.RCNNAccMetric(), [nd.array([[0, 1]])], [nd.array(uniform(1, 2, 3))]),
        "RCNNL1LossMetric": lambda: scored(rcnn.RCNNL1LossMetric(), [one_hot, one_hot], [one_hot]),
        "MaskAccMetric": lambda: scored(rcnn.MaskAccMetric(), [one_hot, one_hot], [one_hot]),
        "MaskFGAccMetric": lambda: scored(rcnn.MaskFGAccMetric(), [one_hot, one_hot], [one_hot]),
        "tracking": lambda: [tracking.success_overlap(np.array(line["gt"]), np.array(line["found"]), 3),
                             tracking.success_error(np.array(line["gt"])[:, :2], np.array(line["found"])[:, :2],
                                                    np.arange(0, 51, 1), 3)],
        "bbox_iou": lambda: module("utils.bbox").bbox_iou(boxes()[:, :4], boxes()[:, :4]),
        "bbox_xywh_to_xyxy": lambda: [getattr(module("utils.bbox"), name)(form) for name in (
            "bbox_xywh_to_xyxy", "bbox_xyxy_to_xywh") for form in (boxes()[:, :4], tuple(boxes()[0, :4]))],
        "bbox_clip_xyxy": lambda: module("utils.bbox").bbox_clip_xyxy(boxes()[:, :4], 30, 30),
    }  # fmt: skip


def data() -> dict[str, Case]:
    """Loaders, samplers, drawings and what else is used in a script."""
    get, viz, tools = module("data"), module("utils.viz"), module("utils")
    samples = [(np.zeros(3, "float32"), boxes()[:rows]) for rows in (2, 1, 2, 2)]
    coded = [(image(), boxes()[:rows]) for rows in (2, 1)]
    batchify = get.batchify

    def first(workers):
        loader = get.DetectionDataLoader(samples, 2, num_workers=workers)
        return next(iter(loader))

    def voc(kind, *options):
        with tempfile.TemporaryDirectory() as folder:
            root = gp.datasets.scenes.write(folder, 4, num_test=2, size=64)
            dataset = kind(str(Path(root).parent), splits=[(Path(root).name, "train")], **dict(options))
            return dataset[0]

    def drawn():
        import matplotlib.pyplot as plt

        axes = [viz.plot_image(image()), viz.plot_bbox(image(), boxes()[:, :4], np.ones(2), boxes()[:, 4])]
        found = [len(one.patches) for one in axes]
        plt.close("all")
        return found

    def recorded():
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "data")
            writer = mx.recordio.MXIndexedRecordIO(f"{path}.idx", f"{path}.rec", "w")
            for number in range(2):
                label = np.array([4, 5, 80, 60, 0, 0.1, 0.1, 0.5, 0.5], "float32")
                header = mx.recordio.IRHeader(0, label, number, 0)
                writer.write_idx(number, mx.recordio.pack_img(header, image().asnumpy(), quality=9, img_fmt=".png"))
            writer.close()
            return get.RecordFileDetection(f"{path}.rec")[1]

    scheduler = tools.LRSequential([tools.LRScheduler("linear", base_lr=0, target_lr=1, niters=3),
                                    tools.LRScheduler("cosine", base_lr=1, niters=5)])  # fmt: skip
    return {
        "DetectionDataLoader": lambda: first(0),
        "DetectionDataLoader, workers": lambda: first(2),
        "batchify": lambda: [batchify.Pad(pad_val=-1)([one[1] for one in samples]), batchify.Append()(
            [one[1] for one in samples]), batchify.Tuple(batchify.Stack(), batchify.Pad(ret_length=True))(samples)],
        "MixupDetection": lambda: _mixed(get, coded),
        "RecordFileDetection": recorded,
        "samplers": lambda: [[*module("data.sampler").SplitSampler(7, 2, 0)], [*module(
            "data.sampler").SplitSortedBucketSampler([3, 1, 2, 5], 2, num_parts=1, shuffle=True)]],
        "LRScheduler": lambda: [scheduler(step) for step in range(8)],
        "drawings": drawn,
        "cv_plot_bbox": lambda: viz.cv_plot_bbox(image(), boxes()[:, :4], np.ones(2), boxes()[:, 4], colors={0: (9, 9, 9), 1: (5, 5, 5)}),
        "expand_mask": lambda: viz.expand_mask(uniform(2, 28, 28), boxes()[:, :4], (80, 60), np.ones(2)),
        "plot_mask": lambda: viz.plot_mask(image().asnumpy(), np.ones((1, 60, 80), "uint8")).shape,
        "get_color_pallete": lambda: np.asarray(viz.get_color_pallete(np.ones((4, 4)))),
        "cv_merge_two_images": lambda: viz.cv_merge_two_images(image(), image()),
        "crop_like_SiamFC": lambda: module("utils.data.tracking").crop_like_SiamFC(image().asnumpy(), [5, 5, 40, 40]),
        "TrainingHistory": lambda: tools.TrainingHistory(["a"]).update([0.5]),
        "kitti": lambda: module("data.kitti.kitti_utils").sub2ind((4, 5), np.array([1]), np.array([2])),
    }  # fmt: skip


def _mixed(get, samples):
    dataset = get.MixupDetection(samples)
    dataset.set_mixup(np.random.beta, 1.5, 1.5)
    return dataset[0]


def gluonnlp() -> dict[str, Case]:
    """What scripts with GluonNLP use most."""
    if importlib.util.find_spec("gluonnlp") is None:
        return {}
    import gluonnlp as nlp

    counter = nlp.data.count_tokens("a a a b b c".split())
    vocabulary = nlp.Vocab(counter)
    rows, lengths = [np.arange(n) for n in (3, 5, 4, 2)], [3, 5, 4, 2]
    batchify, masked = nlp.data.batchify, nlp.loss.MaskedSoftmaxCELoss()
    model = lambda: nlp.model.StandardRNN("lstm", 20, 4, 4, 1, 0.0, tie_weights=False)  # noqa: E731

    def embedding():
        found = nlp.embedding.TokenEmbedding(
            unknown_token="<unk>", idx_to_token=["<unk>", "a"], idx_to_vec=nd.array(uniform(2, 3))
        )
        vocabulary.set_embedding(found)
        return vocabulary.embedding["a"]

    def bert():
        encoder = nlp.model.BERTEncoder(units=8, hidden_size=16, num_layers=1, num_heads=2, max_length=8)
        net = nlp.model.BERTModel(encoder, 20, 2, 8, 8)
        net.initialize(mx.init.One())
        return [
            one
            for one in net(nd.ones((2, 5)), nd.zeros((2, 5)), nd.array([5, 3]), nd.array([[0, 1]] * 2))
            if isinstance(one, nd.NDArray)
        ]

    def corpus():
        found = nlp.data.batchify.CorpusBatchify(vocabulary, 2)(gluon.data.SimpleDataset("a b c a b c a b".split()))
        return [one for one in found]

    return {
        "nlp Vocab": lambda: [vocabulary[["a", "z"]], vocabulary.to_indices("b")],
        "nlp embedding": embedding,
        "nlp batchify": lambda: [batchify.Pad(ret_length=True)(rows), batchify.Stack()(lengths), batchify.Tuple(
            batchify.Pad(), batchify.List())([*zip(rows, lengths)])],
        "nlp CorpusBatchify": corpus,
        "nlp samplers": lambda: [[*nlp.data.FixedBucketSampler(lengths, 2, 2, shuffle=True)], [
            *nlp.data.SortedBucketSampler(lengths, 2)], [*nlp.data.SortedSampler(lengths)]],
        "nlp FixedBucketSampler": lambda: [*nlp.data.FixedBucketSampler(
            lengths, 2, num_buckets=2, ratio=0.5, bucket_scheme=nlp.data.ExpWidthBucket())],
        "nlp transforms": lambda: [nlp.data.PadSequence(5)([1, 2]), nlp.data.ClipSequence(1)([1, 2]), len(
            nlp.data.SacreMosesTokenizer.__name__)],
        "nlp MaskedSoftmaxCELoss": lambda: gradient(masked, uniform(2, 3, 4), nd.array([[0, 1, 2]] * 2), nd.array([3, 1])),
        "nlp LabelSmoothing": lambda: nlp.loss.LabelSmoothing(units=4)(nd.array([0, 1])),
        "nlp ActivationRegularizationLoss": lambda: nlp.loss.ActivationRegularizationLoss(2)(nd.array(uniform(2, 3))),
        "nlp StandardRNN": lambda: output(model(), nd.ones((3, 2)))[0],
        "nlp BERTModel": bert,
        "nlp BeamSearch": lambda: nlp.model.BeamSearchSampler(2, lambda data, states: (nd.array(uniform(4, 5)), states), 4)(
            nd.array([0, 1]), nd.zeros((2, 1))),
        "nlp TransformerEncoder": lambda: output(nlp.model.TransformerEncoder(units=8, hidden_size=8, num_heads=2, num_layers=1,
            max_length=10), nd.array(uniform(2, 5, 8)), None, nd.array([5, 3]))[0],
        "nlp ngram hashes": lambda: nlp.vocab.create_subword_function("NGramHashes", num_subwords=50)(["ab", "c"]),
        "nlp BERTAdam": lambda: _adam(),
    }  # fmt: skip


def _adam():
    net = gluon.nn.Dense(2, in_units=2)
    net.initialize(mx.init.One())
    trainer = gluon.Trainer(net.collect_params(), "bertadam", {"learning_rate": 0.1})
    with mx.autograd.record():
        loss = net(nd.array(uniform(3, 2)))
    loss.backward()
    trainer.step(3)
    return net.weight.data()
