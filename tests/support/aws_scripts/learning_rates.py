"""Stands for the module of this name beside AWS's scripts: a schedule that sets `lr` by itself."""


class AnnealingLR:
    def __init__(self, optimizer, start_lr, warmup_iter, total_iters, min_lr=0.0, last_iter=0):
        self.optimizer, self.num_iters = optimizer, last_iter
        self.start_lr, self.min_lr = start_lr, min_lr
        self.warmup_iter, self.total_iters = warmup_iter, total_iters
        self.step(last_iter)

    def get_lr(self):
        if self.num_iters <= self.warmup_iter:
            return self.start_lr * self.num_iters / max(1, self.warmup_iter)
        share = (self.num_iters - self.warmup_iter) / self.total_iters
        return max(self.start_lr * (1 - share), self.min_lr)

    def step(self, step_num=None):
        self.num_iters = self.num_iters + 1 if step_num is None else step_num
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr()

    def state_dict(self):
        return {"start_lr": self.start_lr, "num_iters": self.num_iters}

    def load_state_dict(self, state):
        self.start_lr = state["start_lr"]
        self.step(state["num_iters"])
