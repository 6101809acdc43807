"""Trainers of Hugging Face and Lightning for short trainings that write nothing."""


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


def quiet_lightning(folder, **more):
    """Give a trainer for the CPU without bars, logs, summaries or checkpoints."""
    import lightning

    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return lightning.Trainer(default_root_dir=folder, **quiet | more)
