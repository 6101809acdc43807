"""Settings of Hugging Face's Trainer for a short training that writes nothing."""


def quiet_settings(folder, **more):
    """Train on the CPU, 8 samples a step; no bars, logs, reports or checkpoints."""
    import transformers

    quiet = {
        "per_device_train_batch_size": 8,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    return transformers.TrainingArguments(output_dir=folder, **quiet | more)
