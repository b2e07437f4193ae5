"""Visible tests of chapter 02. Each compares with the formula, computed here in float64."""

import pytest
import torch

EPS = 1e-6


def formula(x, weight, eps):
    """RMSNorm from its definition, in float64, one row at a time."""
    rows = x.double().reshape(-1, x.shape[-1])
    out = [row / (sum(v * v for v in row) / len(row) + eps).sqrt() for row in rows]
    return (torch.stack(out).reshape(x.shape) * weight.double()).to(x.dtype)


def plain_rows(seed, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 48, generator=g) * 3 + 1
    weight = torch.rand(48, generator=g) + 0.5
    return x.to(dtype), weight.to(dtype)


def half_rows(seed):
    x, weight = plain_rows(seed, torch.float16)
    return x, weight


def tiny_rows(seed):
    x, weight = plain_rows(seed)
    return x * 1e-4, weight


def huge_half_rows(seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 48, generator=g) * 400
    weight = torch.rand(48, generator=g) + 0.5
    return x.half(), weight.half()


def strided_rows(seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(48, 5, generator=g).t()  # [5, 48], not contiguous
    weight = torch.rand(96, generator=g)[::2] + 0.5
    return x, weight


def rows_and_residual(seed, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 48, generator=g) + 0.5
    residual = torch.randn(4, 48, generator=g) * 2
    weight = torch.rand(48, generator=g) + 0.5
    return x.to(dtype), residual.to(dtype), weight.to(dtype)


def half_rows_and_residual(seed):
    x, residual, weight = rows_and_residual(seed, torch.float16)
    return x, residual, weight


@pytest.mark.task("ch02.1")
def test_worked_example(check):
    """the worked example of the stub"""
    check.example()


@pytest.mark.task("ch02.1")
def test_formula(check):
    """x / sqrt(mean(x * x) + eps) * weight, for rows of a usual size"""
    x, weight = check.inputs(plain_rows)
    check.close(formula(x, weight, EPS), x, weight, EPS)


@pytest.mark.task("ch02.1")
def test_large_eps(check):
    """eps is added to the mean square, under the root"""
    x, weight = check.inputs(plain_rows, seed=1)
    check.close(formula(x, weight, 2.0), x, weight, 2.0)


@pytest.mark.task("ch02.1")
def test_tiny_rows(check):
    """rows so small that eps decides the result"""
    x, weight = check.inputs(tiny_rows)
    check.close(formula(x, weight, EPS), x, weight, EPS)


@pytest.mark.task("ch02.1")
def test_zero_row(check):
    """a row of zeros gives zeros, not NaN"""
    check.close(torch.zeros(2, 8), torch.zeros(2, 8), torch.ones(8), EPS)


@pytest.mark.task("ch02.1")
def test_float16(check):
    """float16 in, float16 out, with the statistics in float32"""
    x, weight = check.inputs(half_rows)
    check.close(formula(x, weight, EPS), x, weight, EPS)


@pytest.mark.task("ch02.1")
def test_huge_float16(check):
    """float16 rows whose squares are beyond float16"""
    x, weight = check.inputs(huge_half_rows)
    check.close(formula(x, weight, EPS), x, weight, EPS)


@pytest.mark.task("ch02.1")
def test_heads(check):
    """each head of [T, Hq, D] is a row of its own"""
    x, weight = check.inputs(plain_rows, seed=2)
    x, weight = x.reshape(3, 4, 24), weight[:24]
    check.close(formula(x, weight, EPS), x, weight, EPS)


@pytest.mark.task("ch02.1")
def test_not_contiguous(check):
    """a transposed view and a strided weight"""
    x, weight = check.inputs(strided_rows)
    check.close(formula(x, weight, EPS), x, weight, EPS)


@pytest.mark.task("ch02.1")
def test_inputs_stay(check):
    """x and weight are the caller's: they stay as they were"""
    x, weight = check.inputs(plain_rows, seed=3)
    check.leaves_inputs_alone(x, weight, EPS)


@pytest.mark.task("ch02.2")
def test_worked_example_of_add(check):
    """the worked example of the stub"""
    check.example()


@pytest.mark.task("ch02.2")
def test_sum_and_norm(check):
    """y is the norm of x + residual, the new residual is the plain sum"""
    x, residual, weight = check.inputs(rows_and_residual)
    total = x + residual
    check.close((formula(total, weight, EPS), total), x, residual, weight, EPS)


@pytest.mark.task("ch02.2")
def test_sum_and_norm_float16(check):
    """both results are float16 when x is"""
    x, residual, weight = check.inputs(half_rows_and_residual)
    total = x + residual
    check.close((formula(total, weight, EPS), total), x, residual, weight, EPS)


@pytest.mark.task("ch02.2")
def test_two_layers(check):
    """the residual of one call goes into the next"""
    x, residual, weight = check.inputs(rows_and_residual, seed=1)

    def two_layers(add_rms_norm):
        y, total = add_rms_norm(x.clone(), residual.clone(), weight, EPS)
        return add_rms_norm(y, total, weight, EPS)

    total = x + residual
    total = formula(total, weight, EPS) + total
    check.probe((formula(total, weight, EPS), total), two_layers)


@pytest.mark.task("ch02.2")
def test_eps_reaches_the_norm(check):
    """the eps that was passed is the one used"""
    x, residual, weight = check.inputs(rows_and_residual, seed=2)
    total = x + residual
    check.close((formula(total, weight, 2.0), total), x, residual, weight, 2.0)


@pytest.mark.task("ch02.2")
def test_inputs_of_add_stay(check):
    """x, residual and weight stay as they were"""
    x, residual, weight = check.inputs(rows_and_residual, seed=3)
    check.leaves_inputs_alone(x, residual, weight, EPS)
