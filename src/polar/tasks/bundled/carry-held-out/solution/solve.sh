#!/bin/sh
cat hammer.log > spring.txt
