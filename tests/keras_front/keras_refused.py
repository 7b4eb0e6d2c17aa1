"""What is refused by name, and what we use of Keras though it is private."""

import keras
from keras_models import BACKEND, FOLDER, fit, network, refused

import springline.keras as front


def check_private_names_of_keras():
    """What springline.keras uses though it is private: if one is gone, this names it."""
    model, callback = network(), keras.callbacks.Callback()
    callback.set_model(model)
    assert callback._model is model
    assert model._initial_epoch is None
    model._initial_epoch = 1
    assert len(fit(model, epochs=3)["loss"]) == 2  # `fit` looks at it after `on_train_begin`
    layers = model._flatten_layers()
    found = [v.path for layer in layers for v in layer._non_trainable_variables]
    assert any(path.endswith("moving_mean") for path in found)


def check_refused():
    words = "`period` must be an integer >= 1."
    refused(ValueError, words, front.ElasticAverage, period=0)
    refused(ValueError, "`moving_rate` must be in (0, 1]", front.ElasticAverage, moving_rate=2)
    refused(TypeError, "`outer` must be one of `springline.outer`", front.DiLoCo, outer="sgd")
    refused(ValueError, "`timeout` must be seconds >= 0", front.ModelAverage, timeout=-1)
    words = "`use_locking` must be True or False"
    refused(TypeError, words, front.ModelAverage, use_locking="no")
    refused(ValueError, "`rho` adds to every step's gradients", front.ElasticAverage, rho=0.1)
    refused(ValueError, "without `rho` leave it out", front.ElasticAverage, optimizer="sgd")
    refused(ImportError, "springline.keras has no SlowMo", getattr, front, "SlowMo")
    agn = front.AGN("adam")
    words = "Compile the model with `callback.optimizer`"
    refused(ValueError, words, fit, network(), agn)
    pulled = front.ElasticAverage(optimizer="sgd", rho=0.1)
    refused(ValueError, words, fit, network(optimizer=pulled.optimizer), agn)
    words = "an optimizer of Keras itself. Received: Observed(rho=0)"
    refused(ValueError, words, fit, network(optimizer=agn.optimizer), front.DiLoCo())
    refused(ValueError, "Pass `outer=`, one of", front.AGN, "rmsprop")
    clipped = keras.optimizers.Adam(clipnorm=1.0)
    refused(ValueError, "Received: Adam with clipnorm", front.AGN, clipped)
    refused(TypeError, "Observed cannot be inside", front.AGN, agn.optimizer)
    scaled = keras.optimizers.SGD(loss_scale_factor=2.0)
    refused(ValueError, "`loss_scale_factor` scales", front.AGN, scaled)
    ema = network(optimizer=keras.optimizers.Adam(use_ema=True))
    refused(ValueError, "`use_ema=True`", fit, ema, front.ElasticAverage())
    if BACKEND == "tensorflow":
        import tensorflow as tf

        unbuilt = keras.Sequential([keras.layers.Dense(2, "softmax")])
        unbuilt.compile("sgd", "sparse_categorical_crossentropy")
        refused(ValueError, "not built yet", fit, unbuilt, front.ElasticAverage())
        with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
            mirrored = keras.Sequential([keras.Input([4]), keras.layers.Dense(2, "softmax")])
            mirrored.compile("sgd", "sparse_categorical_crossentropy")
        words = "tf.distribute.MirroredStrategy"
        refused(ValueError, words, fit, mirrored, front.ElasticAverage())
    if BACKEND == "torch":
        from torch.distributed import destroy_process_group, init_process_group
        from torch.nn.parallel import DistributedDataParallel

        store = (FOLDER / "store").as_uri()
        init_process_group("gloo", init_method=store, rank=0, world_size=1)
        callback = front.ElasticAverage()
        callback.set_model(DistributedDataParallel(network()))
        refused(ValueError, "DistributedDataParallel", callback.on_train_begin)
        destroy_process_group()
    if BACKEND == "jax":
        model = network()  # which clears the session
        keras.distribution.set_distribution(keras.distribution.DataParallel())
        words = "keras.distribution.DataParallel"
        refused(ValueError, words, fit, model, front.ElasticAverage())
        keras.distribution.set_distribution(None)
