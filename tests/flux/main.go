// Does to manifests on standard input what Flux's kustomize-controller does, with the package that it uses for that, for
// the Kustomization `platform` in the namespace `flux-system`. $KUBECONFIG names the API server.
//
//	flux apply     applies them, waits until they are ready, and prints what it did
//	flux diff      prints whether they have drifted
//	flux prune     deletes them if they are its own: they are no longer in Git
//	flux status    prints what kstatus says about live objects
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/fluxcd/cli-utils/pkg/kstatus/polling"
	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	"github.com/fluxcd/pkg/ssa"
	"github.com/fluxcd/pkg/ssa/normalize"
	"github.com/fluxcd/pkg/ssa/utils"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
)

const (
	name      = "platform"
	namespace = "flux-system"
)

func main() {
	log.SetLogger(zap.New(zap.WriteTo(os.Stderr)))
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: flux apply|diff|prune|status")
		os.Exit(2)
	}
	if err := run(context.Background(), os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, command string) error {
	objects, err := utils.ReadObjects(os.Stdin)
	if err != nil {
		return err
	}
	if command == "status" {
		return showStatus(objects)
	}
	config, err := ctrl.GetConfig()
	if err != nil {
		return err
	}
	kube, err := client.New(config, client.Options{})
	if err != nil {
		return err
	}
	poller := polling.NewStatusPoller(kube, kube.RESTMapper(), polling.Options{})
	owner := ssa.Owner{Field: "kustomize-controller", Group: "kustomize.toolkit.fluxcd.io"}
	manager := ssa.NewResourceManager(kube, poller, owner)
	manager.SetOwnerLabels(objects, name, namespace)
	if err := normalize.UnstructuredList(objects); err != nil {
		return err
	}
	switch command {
	case "apply":
		return apply(ctx, manager, objects)
	case "diff":
		return diff(ctx, manager, objects)
	case "prune":
		options := ssa.DefaultDeleteOptions()
		options.Inclusions = manager.GetOwnerLabels(name, namespace)
		changes, err := manager.DeleteAll(ctx, objects, options)
		fmt.Println(changes)
		return err
	default:
		return fmt.Errorf("unknown command %q", command)
	}
}

func apply(ctx context.Context, manager *ssa.ResourceManager, objects []*unstructured.Unstructured) error {
	changes, err := manager.ApplyAllStaged(ctx, objects, ssa.DefaultApplyOptions())
	if changes != nil {
		fmt.Println(changes)
	}
	if err != nil {
		return err
	}
	options := ssa.DefaultWaitOptions()
	options.Timeout = 20 * time.Second
	return manager.WaitForSet(changes.ToObjMetadataSet(), options)
}

func diff(ctx context.Context, manager *ssa.ResourceManager, objects []*unstructured.Unstructured) error {
	for _, object := range objects {
		change, _, _, err := manager.Diff(ctx, object, ssa.DefaultDiffOptions())
		if err != nil {
			return err
		}
		fmt.Println(change)
	}
	return nil
}

func showStatus(objects []*unstructured.Unstructured) error {
	for _, object := range objects {
		result, err := status.Compute(object)
		if err != nil {
			return err
		}
		fmt.Printf("%s %s\n", utils.FmtUnstructured(object), result.Status)
	}
	return nil
}
